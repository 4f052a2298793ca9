"""German sentences in the manner of news, made of our own frames and fillers, for the translation prompts."""

import random
import re

SLOTS = {
    "ort": "Berlin;München;Hamburg;Wien;Zürich;Leipzig;Dresden;Köln;Stuttgart;Bremen;Paris;London;Madrid;Rom;Athen;"
    "Warschau;Brüssel;Kopenhagen;Oslo;Lissabon;Istanbul;Moskau;Tokio;Peking;New York;Chicago;Sydney;Kairo;Nairobi;"
    "Buenos Aires",
    "land": "Frankreich;Spanien;Italien;Polen;Griechenland;Norwegen;Portugal;Ungarn;Japan;China;Indien;Brasilien;"
    "Kanada;Australien;Mexiko;Ägypten;Südafrika;Kenia;Chile;Russland;Deutschland;Österreich;Dänemark;Schweden",
    "tag": "am Montag;am Dienstag;am Mittwoch;am Donnerstag;am Freitag;am Samstag;am Sonntag;am Wochenende;gestern "
    "Abend;heute Morgen;vor zwei Wochen;Anfang der Woche",
    "jahr": "1968;1989;1994;1999;2003;2005;2008;2010;2011;2012;2013;2014;2015",
    "zahl": "drei;fünf;sieben;zehn;zwölf;15;18;25;30;40;60;75;120;200;350;1.200;4.000;12.000",
    "prozent": "1,5;2,3;3;4,8;5;7,4;9;12;15;20;27;33;45;60",
    "person": "die Ministerin;der Bürgermeister;die Kanzlerin;der Trainer;die Richterin;der Polizeisprecher;die "
    "Forscherin;der Vorsitzende;die Präsidentin;der Staatsanwalt;die Direktorin;der Architekt;die Ärztin;der Fahrer;"
    "der Sprecher",
    "name": "Anna Becker;Thomas Wagner;Maria Schulz;Peter Hoffmann;Sabine Krüger;Jan Neumann;Klaus Richter;Julia "
    "Braun;Martin Vogel;Petra Lange;Stefan Winter;Eva Sommer;Lukas Berger;Hannah Frank;David Miller;Laura Rossi",
    "firma": "der Autohersteller;die Bank;der Energiekonzern;die Fluggesellschaft;das Start-up;der Verlag;die "
    "Brauerei;der Versicherer;das Bahnunternehmen;der Online-Händler;die Molkerei;der Chemiekonzern",
    "gruppe": "die Gewerkschaft;die Opposition;die Regierung;der Stadtrat;die Bürgerinitiative;der Verband;die "
    "Polizei;die Feuerwehr;das Gericht;die Universität;der Verein;die Behörde;das Parlament;die Kommission",
    "bau": "das neue Krankenhaus;die alte Brücke;das Stadion;der Flughafen;die Bibliothek;das Rathaus;der Bahnhof;"
    "das Museum;die Grundschule;das Einkaufszentrum;der Radweg;die Schwimmhalle",
    "thema": "höhere Löhne;billigeren Wohnraum;mehr Sicherheit;sauberes Wasser;bessere Schulen;schnelleres Internet;"
    "weniger Bürokratie;den Schutz der Wälder;strengere Regeln;neue Radwege;ein Verbot von Plastiktüten",
    "ursache": "wegen des starken Regens;wegen eines technischen Fehlers;nach langen Verhandlungen;trotz heftiger "
    "Kritik;aus Kostengründen;wegen des Streiks;nach einem Hinweis aus der Bevölkerung;wegen der Hitze;aus "
    "Sicherheitsgründen",
    "verein": "der FC Bayern;Werder Bremen;der Hamburger SV;Borussia Dortmund;der 1. FC Köln;Eintracht Frankfurt;"
    "Hertha BSC;der VfB Stuttgart;die Nationalmannschaft;der Aufsteiger",
    "ding": "ein Fahrrad;ein altes Gemälde;ein Tagebuch;eine Kamera;ein Koffer;ein Brief;ein Boot;ein Klavier;eine "
    "Münze;ein Mobiltelefon;ein Ring;eine Landkarte",
    "tier": "ein Wolf;ein Elefant;ein Hund;eine Katze;ein Adler;ein Bär;ein Pferd;ein Pinguin;ein Fuchs;eine "
    "Schildkröte",
    "wetter": "Sturm;Schnee;Hagel;Nebel;Gewitter;Glatteis;Hochwasser;Waldbrände",
    "fach": "Physik;Medizin;Geschichte;Biologie;Informatik;Musik;Chemie;Philosophie;Mathematik;Astronomie",
    "adjektiv": "überraschend;wichtig;falsch;teuer;gefährlich;notwendig;ungewöhnlich;verständlich;mutig;"
    "unverantwortlich",
    "speise": "Brot;Käse;Milch;Kaffee;Schokolade;Fleisch;Gemüse;Bier;Olivenöl;Honig",
    "monat": "Januar;Februar;März;April;Mai;Juni;Juli;August;September;Oktober;November;Dezember",
}

FRAMES = """
{Person} sagte {tag} in {ort} , das Ergebnis sei {adjektiv} .
{Firma} will bis {jahr} rund {zahl} neue Stellen in {land} schaffen .
{Gruppe} fordert {thema} und droht mit weiteren Protesten .
{Bau} in {ort} wird {ursache} erst im {monat} eröffnet .
Bei einem Unfall in der Nähe von {ort} sind {tag} {zahl} Menschen verletzt worden .
{Verein} verlor {tag} in {ort} mit 1 : 3 und muss nun um den Klassenerhalt bangen .
Die Preise für {speise} sind in {land} um {prozent} Prozent gestiegen .
" Wir haben lange darauf gewartet " , sagte {name} , " und jetzt ist es endlich so weit . "
{Name} fand {tag} {ding} auf dem Dachboden und brachte es zur Polizei .
In {ort} ist {tag} {tier} aus dem Zoo entlaufen und wurde nach {zahl} Stunden wieder eingefangen .
{wetter} und starker Wind haben in {land} den Verkehr lahmgelegt .
{Name} studierte {fach} in {ort} und arbeitet seit {jahr} als Lehrerin .
Nach Angaben der Behörden leben in der Region etwa {zahl} Tausend Menschen ohne Strom .
{Gruppe} hat den Antrag {ursache} abgelehnt .
Der Umsatz ist im {monat} um {prozent} Prozent gefallen , teilte {firma} {tag} mit .
Wer {tag} nach {ort} fahren möchte , sollte mehr Zeit einplanen .
Viele Familien in {land} können sich die hohen Mieten nicht mehr leisten .
{Person} widersprach der Darstellung , {firma} habe von dem Fehler gewusst .
Die Ausstellung über {fach} ist noch bis {monat} in {ort} zu sehen .
Seit {jahr} hat sich die Zahl der Touristen in {ort} mehr als verdoppelt .
" Das ist {adjektiv} " , meinte {person} , nachdem {gruppe} den Bericht vorgelegt hatte .
Zum ersten Mal seit {zahl} Jahren gewann {verein} wieder ein Spiel in {ort} .
{Name} und {name} heirateten {tag} in einer kleinen Kirche bei {ort} .
Das Kind hatte {ding} im Park gesehen und sofort seine Mutter gerufen .
{Gruppe} warnt vor {wetter} : Autofahrer sollen möglichst zu Hause bleiben .
In der zweiten Halbzeit wechselte der Trainer dreimal , doch {verein} konnte den Rückstand nicht mehr aufholen .
{Firma} ruft {zahl} Tausend Packungen {speise} zurück , weil sie Metallteile enthalten könnten .
Obwohl {bau} erst {zahl} Jahre alt ist , muss das Dach {ursache} erneuert werden .
Der Täter floh zu Fuß in Richtung {ort} und konnte bisher nicht gefasst werden .
{Person} hofft , dass bis {monat} eine Lösung gefunden wird .
Können Sie mir sagen , wann der nächste Zug nach {ort} fährt ?
Warum hat {gruppe} so lange geschwiegen ?
Wissenschaftler aus {land} haben herausgefunden , dass {speise} weniger gesund ist als bisher angenommen .
Im {monat} {jahr} zog {name} von {ort} nach {ort} , um dort {fach} zu unterrichten .
Die Verhandlungen zwischen {land} und {land} wurden {tag} ohne Ergebnis abgebrochen .
Mehr als {zahl} Helfer suchten die ganze Nacht nach dem vermissten Jungen aus {ort} .
Für {person} kam die Entscheidung nicht unerwartet : " Wir wussten , dass es {adjektiv} werden würde . "
Laut einer Umfrage wünschen sich {prozent} Prozent der Bürger in {land} {thema} .
{Bau} wurde {jahr} gebaut und gilt heute als Wahrzeichen von {ort} .
{Name} , {zahl} Jahre lang Mitglied des Vereins , wurde {tag} zum Vorsitzenden gewählt .
Die Feuerwehr rückte mit {zahl} Fahrzeugen aus , um den Brand in der Lagerhalle zu löschen .
Wenn {gruppe} zustimmt , beginnen die Arbeiten im {monat} .
{Verein} trifft {tag} auf {verein} ; der Verlierer scheidet aus .
{Tier} ist {tag} in einem Vorort von {ort} gesehen worden , bestätigte {person} .
Bis zum Abend blieb unklar , ob {firma} das Angebot aus {land} annehmen wird .
Er trank einen Schluck {speise} , stand auf und verließ ohne ein Wort das Haus .
Die alte Frau aus {ort} erzählte , wie sie {jahr} mit nur einem Koffer aus {land} geflohen war .
Kritiker halten den Plan für {adjektiv} , denn er kostet die Steuerzahler {zahl} Millionen Euro .
Die Zinsen bleiben niedrig , obwohl die Inflation in {land} bei {prozent} Prozent liegt .
{Name} spielt seit {jahr} Klavier und gab {tag} ihr erstes Konzert in {ort} .
{Firma} verhandelt mit {gruppe} über {thema} , eine Einigung wird jedoch nicht vor {monat} erwartet .
Ein Sprecher erklärte , die Maschine aus {ort} sei {ursache} umgeleitet worden und sicher in {ort} gelandet .
Schon im {monat} war bekannt geworden , dass {person} zurücktreten will .
Nur {prozent} Prozent der Schüler in {land} lernen {fach} freiwillig .
{Gruppe} veröffentlichte {tag} einen Bericht , nach dem {prozent} Prozent der Flüsse verschmutzt sind .
Die Reise von {ort} nach {ort} dauert mit dem Auto etwa {zahl} Stunden .
Er habe nichts von dem Geld gewusst , sagte {name} {tag} vor Gericht in {ort} .
Ohne die Hilfe der Nachbarn hätte {name} das Haus nach dem {wetter} nicht retten können .
""".strip().splitlines()


def sentence(rng: random.Random) -> str:
    """One sentence; one in four is followed by a second."""

    def fill(match: re.Match) -> str:
        slot = match[1]
        word = rng.choice(SLOTS[slot.lower()].split(";"))
        return word[0].upper() + word[1:] if slot[0].isupper() else word

    frames = rng.sample(FRAMES, 2 if rng.random() < 0.25 else 1)
    text = " ".join(re.sub(r"\{(\w+)\}", fill, frame) for frame in frames)
    return text[0].upper() + text[1:]


def plain(text: str) -> str:
    """The sentence without the spaces that news corpora set around punctuation."""
    text = re.sub(r' ([.,;:?!])', r"\1", text)
    return re.sub(r'" (.*?) "', r'"\1"', text)
