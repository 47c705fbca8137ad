"""What no other choice beats, against trying all pairs; and where its picture puts it."""

from hypothesis import given
from hypothesis import strategies as st

from xinfer.records.pareto import pareto, scatter

coordinate = st.one_of(st.integers(0, 4), st.floats(-1e6, 1e6))
points = st.lists(st.tuples(coordinate, coordinate), max_size=30)


@given(points)
def test_what_is_left_is_exactly_what_no_other_point_beats(places):
    def beaten(point):
        return any(x <= point[0] and y <= point[1] and (x, y) != point for x, y in places)

    assert pareto(places) == [i for i, point in enumerate(places) if not beaten(point)]


@given(st.lists(st.tuples(coordinate, coordinate), min_size=2, max_size=30))
def test_every_point_is_within_the_picture_and_keeps_its_order(places):
    picture = scatter([(x, y, str(i), "") for i, (x, y) in enumerate(places)], "x", "y")
    assert picture is not None
    for dot, (x, y) in zip(picture.dots, places, strict=True):
        assert picture.left <= dot.x <= picture.width
        assert 0 <= dot.y <= picture.height - picture.bottom
        for other, (right, up) in zip(picture.dots, places, strict=True):
            assert dot.x <= other.x or x > right
            assert dot.y >= other.y or y > up
    marks = [place for place, _ in picture.x_marks]
    assert marks == sorted(marks) and all(picture.left <= place <= picture.width for place in marks)


def test_less_than_two_points_are_no_picture():
    assert scatter([(1.0, 2.0, "0", "")], "x", "y") is None


def test_less_memory_and_more_speed_is_unbeaten_and_the_front_goes_through_it():
    gibibyte = 2.0**30
    picture = scatter(
        [(1 * gibibyte, 10.0, "a", ""), (2 * gibibyte, 30.0, "b", ""), (3 * gibibyte, 20.0, "c", "")],
        "memory",
        "speed",
        gibibyte,
    )
    assert picture is not None
    assert [dot.label for dot in picture.dots if dot.unbeaten] == ["a", "b"]
    a, b, _ = picture.dots
    assert picture.front == f"{a.x},{a.y} {b.x},{b.y}"
    assert {text for _, text in picture.x_marks} >= {"2", "2.4"}  # in units
