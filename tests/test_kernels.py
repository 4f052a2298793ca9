"""CPU kernels for few rows: the same values as nn.Linear, the user's modules untouched."""

import pytest
import torch
from torch import nn

from dflash_hf.drafter.kernels import FewRowsLinear, PackedHead, with_cpu_kernels
from targets import FIRST_TEXT_ID, VOCAB, make_target

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the order was measured on MKL")


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 4), (1, 8), (3, 5), (8, 6), (7, 7), (8, 8), (0, 4)])
def test_products_of_any_number_of_rows(shape, bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(48, 80, bias=bias), torch.randn(*shape, 48)
    with torch.no_grad():
        out = with_cpu_kernels(linear)(x)
        expected = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    assert out.is_contiguous() and out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@needs_mkl
def test_the_module_itself_stays_as_it_is_and_its_changes_are_followed():
    target = make_target("qwen3")
    before = {name: (type(module), set(module.__dict__)) for name, module in target.named_modules()}
    twin = with_cpu_kernels(target)
    assert {name: (type(module), set(module.__dict__)) for name, module in target.named_modules()} == before
    own = dict(target.named_parameters())
    assert all(own[name] is parameter for name, parameter in twin.named_parameters())
    linears = [name for name, module in twin.named_modules() if type(module) is FewRowsLinear]
    assert linears == [name for name, module in target.named_modules() if type(module) is nn.Linear] != []

    # A weight that is changed or replaced, and a hook that is set later, count for both.
    ids = torch.randint(FIRST_TEXT_ID, VOCAB, (1, 6))
    layer, calls = target.model.layers[0].mlp.up_proj, []
    with torch.no_grad():
        target.model.norm.weight.mul_(1.5)
        layer.weight = nn.Parameter(torch.randn_like(layer.weight))
        layer.register_forward_hook(lambda module, args, out: calls.append(module))
        torch.testing.assert_close(twin(ids).logits, target(ids).logits, rtol=0, atol=1e-5)
    assert len(calls) == 2 and calls[1] is layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_shares_keys_and_values_between_heads(dtype):
    """Of a twin and of nobody else, with the values that transformers gets from copies, ragged masks included."""
    torch.manual_seed(0)
    target = make_target("qwen3").to(dtype)
    ids = torch.randint(FIRST_TEXT_ID, VOCAB, (3, 6))
    visible = torch.ones(6, 6, dtype=torch.bool).tril().expand(3, 1, 6, 6).clone()
    visible[1, :, 2:, 0] = visible[2, :, 1:, :1] = False
    names = []
    functional, torch_sdpa = nn.functional, nn.functional.scaled_dot_product_attention

    def noting(query, key, *args, **kwargs):
        names.append((query.shape[1], key.shape[1]))
        return torch_sdpa(query, key, *args, **kwargs)

    twin = with_cpu_kernels(target)
    assert target.config._attn_implementation == twin.config._attn_implementation == "sdpa"
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", noting)
        fast, plain = (model(ids, attention_mask=visible, use_cache=False).logits for model in (twin, target))
    heads, shared = target.config.num_attention_heads, target.config.num_key_value_heads
    assert heads > shared and set(names) == {(heads, shared), (heads, heads)}
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)


class Odd(torch.Tensor):
    """A weight that knows its own `linear` only, as quantized and distributed ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.mm, torch.ops.mkldnn._reorder_linear_weight):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_of_other_kinds_are_left_to_their_layer():
    linear, x = nn.Linear(16, 32), torch.randn(8, 16)
    expected = linear(x)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Odd), requires_grad=False)
    assert type(linear) is nn.Linear and type(linear.weight) is not nn.Parameter
    assert PackedHead.of(linear) is None
    torch.testing.assert_close(with_cpu_kernels(linear)(x).as_subclass(torch.Tensor), expected)


@needs_mkl
def test_layers_that_are_not_plain_stay():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    module = nn.Sequential(Own(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8, device="meta"))
    offloaded = nn.Linear(8, 8)
    offloaded.forward = lambda x: x - 1  # what accelerate's hooks do
    module.append(offloaded)
    twin = with_cpu_kernels(module)
    assert [type(part) for part in twin[:3]] == [Own, nn.Linear, nn.Linear]
    assert torch.equal(twin[3](torch.ones(4, 8)), torch.zeros(4, 8))
    assert torch.equal(twin[0](torch.ones(4, 8)), module[0](torch.ones(4, 8)))


def test_a_packed_head_follows_its_weight():
    linear, x = nn.Linear(32, 96, bias=False), torch.randn(5, 32)
    head = PackedHead.of(linear)
    if head is None:
        pytest.skip("no oneDNN")
    torch.testing.assert_close(head(x), linear(x), rtol=0, atol=1e-5)
    with torch.no_grad():
        linear.weight.mul_(2)
    torch.testing.assert_close(PackedHead.of(linear)(x), linear(x), rtol=0, atol=1e-5)
    assert PackedHead.of(nn.Linear(4, 4).double()) is None


@needs_mkl
def test_autocast_decides_the_dtype_of_every_row_count():
    linear = with_cpu_kernels(nn.Linear(16, 16))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert {linear(torch.randn(rows, 16)).dtype for rows in (1, 3, 4, 8, 60)} == {torch.bfloat16}
