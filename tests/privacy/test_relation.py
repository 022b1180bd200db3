import pytest

from dpbnn.privacy.relation import Relation


@pytest.mark.parametrize(
    ("text", "relation"),
    [
        ("zero-out", Relation.ZERO_OUT),
        ("Zero_Out", Relation.ZERO_OUT),
        ("add/remove", Relation.ADD_REMOVE),
        ("add_remove", Relation.ADD_REMOVE),
        ("replace one", Relation.REPLACE_ONE),
        (Relation.REPLACE_ONE, Relation.REPLACE_ONE),
    ],
)
def test_names_are_read_whatever_their_punctuation(text, relation):
    assert Relation.parse(text) is relation


def test_an_unknown_name_lists_the_relations():
    with pytest.raises(ValueError, match=r"relation='swap'.*'zero-out'.*'replace-one'"):
        Relation.parse("swap")


def test_only_replacing_moves_a_sum_by_two_clips():
    assert [r.shift for r in Relation] == [1.0, 1.0, 2.0]
