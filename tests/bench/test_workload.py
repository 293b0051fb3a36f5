from __future__ import annotations

from enginebay.bench.workload import Workload, random_workload


def test_equal_arguments_give_equal_ids() -> None:
    one, same = (random_workload(3, 7, 5, vocab_size=50, seed=4) for _ in range(2))
    assert one == same
    assert one.prompts != random_workload(3, 7, 5, vocab_size=50, seed=5).prompts
    assert [len(p) for p in one.prompts] == [7, 7, 7]
    assert one.lengths == [5, 5, 5]
    assert {0 <= token < 50 for prompt in one.prompts for token in prompt} == {True}
    assert (one.num_input_tokens, one.num_output_tokens) == (21, 15)


def test_the_drivers_line_holds_all_of_it() -> None:
    work = Workload(prompts=[[1]], lengths=[2], temperature=0.5, seed=3)
    assert Workload(**work.line()) == work
