"""The network: causal, of the stated size, and a function of the random state alone when it writes."""

from __future__ import annotations

import pytest
import torch

from ckptrun.examples.gpt import GPT


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(width=16, depth=2, heads=2, context=12)


def test_no_position_sees_what_comes_after_it(gpt: GPT) -> None:
    tokens = torch.randint(256, (3, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    with torch.no_grad():
        before, after = gpt(tokens), gpt(changed)
    assert before.shape == (3, 12, 256)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_embedding_and_output_share_their_weights(gpt: GPT) -> None:
    assert [name for name, p in gpt.named_parameters() if 256 in p.shape] == ["embedding.weight"]
    assert all(".cosine" not in name and ".sine" not in name for name in gpt.state_dict())


def test_it_starts_near_knowing_nothing(gpt: GPT) -> None:
    tokens = torch.randint(256, (4, 12))
    loss = torch.nn.functional.cross_entropy(gpt(tokens).flatten(0, 1), torch.randint(256, (48,)))
    assert abs(loss.item() - torch.tensor(256.0).log().item()) < 0.3


def test_an_input_longer_than_the_context_is_refused(gpt: GPT) -> None:
    with pytest.raises(ValueError, match="13 bytes long; the model's context is 12"):
        gpt(torch.zeros(1, 13, dtype=torch.long))


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width 18 is not a multiple of twice the number of heads, 4"):
        GPT(width=18, heads=2)


def test_the_same_seed_writes_the_same_text(gpt: GPT) -> None:
    def write(seed: int) -> bytes:
        torch.manual_seed(seed)
        return gpt.generate(b"def ", 30, temperature=1.0, top_k=256, end=999)

    assert len(write(1)) == 30  # longer than the context: the window slides
    assert write(1) == write(1)
    assert write(1) != write(2)


def test_writing_stops_before_the_end_of_the_file(gpt: GPT) -> None:
    torch.manual_seed(1)
    whole = gpt.generate(b"def ", 30, temperature=1.0, top_k=256, end=999)
    torch.manual_seed(1)
    cut = gpt.generate(b"def ", 30, temperature=1.0, top_k=256, end=whole[10])
    assert cut == whole[: whole.index(whole[10])]


def test_top_k_of_one_takes_the_likeliest(gpt: GPT) -> None:
    with torch.no_grad():
        likeliest = gpt(torch.tensor([list(b"def ")]))[0, -1].argmax().item()
    assert gpt.generate(b"def ", 1, temperature=1.0, top_k=1, end=999) == bytes([int(likeliest)])
