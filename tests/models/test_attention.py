import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from shardwright.errors import PlanError
from shardwright.models.attention import Attention, AttentionConfig, Rotary


def by_hand(attention, x_BTH):
    """Softmax attention in loops over sequences and heads."""
    q, k, v = attention.project(x_BTH)
    size = attention.head_dim
    shared = attention.num_heads // attention.num_kv_heads
    merged = torch.zeros_like(q)
    for sequence in range(len(x_BTH)):
        for head in range(attention.num_heads):
            mine = slice(head * size, (head + 1) * size)
            theirs = slice(head // shared * size, (head // shared + 1) * size)
            scores = q[sequence, :, mine] @ k[sequence, :, theirs].T / size**0.5
            if attention.causal:
                scores = scores + torch.full_like(scores, -torch.inf).triu(1)
            merged[sequence, :, mine] = scores.softmax(-1) @ v[sequence, :, theirs]
    return attention.o(merged)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.sampled(5)  # every fourth case would be causal and fused
def test_attention_equals_a_loop_over_heads(num_heads, num_kv_heads, fused, causal):
    torch.manual_seed(0)
    attention = Attention(8, num_heads, num_kv_heads, fused=fused, causal=causal).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(attention(x), by_hand(attention, x), rtol=1e-12, atol=1e-12)


def test_grouped_heads_equal_many_heads_with_repeated_keys_and_values():
    torch.manual_seed(0)
    grouped, many = Attention(12, 6, 2, head_dim=4).double(), Attention(12, 6, head_dim=4).double()
    repeated = {
        name: value.unflatten(0, (2, 4)).repeat_interleave(3, dim=0).flatten(0, 1) if name[0] in "kv" else value
        for name, value in grouped.state_dict().items()
    }
    many.load_state_dict(repeated)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), many(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rotary", [True, False])
def test_fused_projection_rows_are_those_of_q_then_k_then_v(rotary):
    torch.manual_seed(0)
    apart = Attention(8, 4, 2, rotary=rotary).double()
    fused = Attention(8, 4, 2, rotary=rotary, fused=True).double()
    values = apart.state_dict()
    fused.load_state_dict(
        {
            f"{module}.{kind}": torch.cat([values[f"{part}.{kind}"] for part in parts])
            for module, parts in (("qkv", "qkv"), ("o", "o"))
            for kind in ("weight", "bias")
        }
    )
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(apart(x), fused(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_modules_that_hold_a_part_of_the_heads_add_up_to_the_whole(fused):
    torch.manual_seed(0)
    whole = Attention(12, 6, 3, bias=False, fused=fused, rotary=True).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    total = torch.zeros_like(x)
    q, k, v = whole.qkv.weight.split((12, 6, 6)) if fused else (whole.q.weight, whole.k.weight, whole.v.weight)
    for first, last in ((0, 2), (2, 3)):  # key and value heads
        part = Attention(12, 6, 3, bias=False, fused=fused, rotary=True).double()
        part.num_heads, part.num_kv_heads = 2 * (last - first), last - first
        rows = [q[4 * first : 4 * last], k[2 * first : 2 * last], v[2 * first : 2 * last]]
        if fused:
            part.qkv.weight = torch.nn.Parameter(torch.cat(rows))
        else:
            for linear, mine in zip((part.q, part.k, part.v), rows, strict=True):
                linear.weight = torch.nn.Parameter(mine)
        part.o.weight = torch.nn.Parameter(whole.o.weight[:, 4 * first : 4 * last])
        total = total + part(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-12, atol=1e-12)


def test_attend_can_be_replaced_on_an_instance():
    attention = Attention(8, 2)
    attention.attend = lambda q, k, v: torch.zeros_like(q)
    torch.testing.assert_close(attention(torch.randn(1, 3, 8)), attention.o.bias.expand(1, 3, 8))


def test_dropout_is_a_module_call_on_probabilities_and_its_path_equals_the_fast_one():
    torch.manual_seed(0)
    attention = Attention(8, 4, 2, dropout=0.5).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    seen = []

    def keep_all(module, inputs, output):
        seen.append(inputs[0])
        return inputs[0]

    attention.attention_dropout.register_forward_hook(keep_all)
    written_out = attention(x)
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    torch.testing.assert_close(written_out, attention.eval()(x), rtol=1e-12, atol=1e-12)
    assert len(seen) == 1  # not called outside training


@given(integers(1, 4), integers(1, 6), sampled_from([torch.float32, torch.float64]))
def test_rotation_keeps_the_length_of_every_pair(num_pairs, num_tokens, dtype):
    x = torch.randn(1, 2, num_tokens, 2 * num_pairs, dtype=dtype)
    before, after = x.unflatten(-1, (2, num_pairs)), Rotary(2 * num_pairs)(x).unflatten(-1, (2, num_pairs))
    assert after.dtype == dtype
    torch.testing.assert_close(after.norm(dim=-2), before.norm(dim=-2), rtol=1e-5, atol=1e-6)


def test_scores_of_rotated_vectors_depend_on_their_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rotary = Rotary(8, theta=100.0)
    scores = rotary(q.expand(1, 1, 10, 8))[0, 0] @ rotary(k.expand(1, 1, 10, 8))[0, 0].T
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert not torch.isclose(scores[0, 0], scores[0, 5])


def test_a_rotation_of_some_pairs_is_that_part_of_the_rotation_of_all():
    torch.manual_seed(0)
    whole, part = Rotary(8), Rotary(8)
    part.pairs = (1, 3)
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    held = [1, 3, 5, 7]  # element i turns with element i + 4
    torch.testing.assert_close(part(x[..., held]), whole(x)[..., held])


def test_positions_can_be_replaced_where_a_sequence_begins_elsewhere():
    torch.manual_seed(0)
    rotary, later = Rotary(4), Rotary(4)
    later.positions = lambda num_tokens, device: torch.arange(3, 3 + num_tokens, device=device)
    x = torch.randn(1, 1, 7, 4)
    torch.testing.assert_close(later(x[:, :, 3:]), rotary(x)[:, :, 3:])


def test_half_precision_is_rotated_with_single_precision_angles():
    x = torch.randn(1, 1, 2000, 4).bfloat16()
    rotated = Rotary(4)(x)
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated, Rotary(4)(x.float()).bfloat16())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 10, "num_heads": 4}, "set width=12"),
        ({"num_heads": 4, "num_kv_heads": 3}, "set num_kv_heads=2"),
        ({"width": 12, "num_heads": 4, "rotary": True}, "set head_dim=4"),
        ({"num_heads": 0}, "'num_heads' is too small"),
        ({"dropout": 1.0}, "'dropout' is no fraction"),
    ],
)
def test_heads_that_do_not_fit_are_refused_with_a_fix(settings, message):
    with pytest.raises(PlanError, match=message):
        AttentionConfig(**settings)
