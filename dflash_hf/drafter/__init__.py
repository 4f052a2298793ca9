"""The drafter. The files of this folder travel inside every published drafter repository."""
