import pytest
from hlo_programs import line_of
from hlotools import stored

from collmm.hlo.metadata import SourceLine, StackTables, op_name
from collmm.hlo.parse import parse

TABLES = {
    "FileNames": ['1 "user.py"', '2 "/env/lib/python3.12/site-packages/flax/nn.py"'],
    "FunctionNames": ['1 "<module>"', '2 "step"', '3 "Dense.__call__"'],
    "FileLocations": [
        "1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}",
        "2 {file_name_id=1 function_name_id=2 line=20 end_line=21 column=1 end_column=2}",
        "3 {file_name_id=2 function_name_id=3 line=30 end_line=30 column=1 end_column=2}",
    ],
}
PLAIN = ["1 {file_location_id=1}", "2 {file_location_id=2 parent_frame_id=1}"]
SHIFTED = [
    "1 {file_location_id=1 parent_frame_id=1}",
    "2 {file_location_id=2 parent_frame_id=2}",
]


@pytest.mark.parametrize("frames", [PLAIN, SHIFTED])
def test_both_ways_of_numbering_parents(frames):
    tables = StackTables.read({**TABLES, "StackFrames": frames})
    assert [s.line for s in tables.stack(2)] == [20, 10]
    assert tables.source('{op_name="f" stack_frame_id=2}') == SourceLine("user.py", 20, "step")


def test_library_frames_are_passed_over():
    frames = [*PLAIN, "3 {file_location_id=3 parent_frame_id=2}"]
    tables = StackTables.read({**TABLES, "StackFrames": frames})
    assert tables.source("{stack_frame_id=3}") == SourceLine("user.py", 20, "step")
    only = StackTables.read({**TABLES, "StackFrames": ["1 {file_location_id=3}"]})
    assert only.source("{stack_frame_id=1}").line == 30


def test_source_in_the_metadata_itself():
    tables = StackTables()
    metadata = '{op_type="dot" op_name="jit(f)/dot" source_file="a b.py" source_line=7}'
    assert tables.source(metadata) == SourceLine("a b.py", 7)
    assert str(tables.source(metadata)) == "a b.py:7"
    assert op_name(metadata) == "jit(f)/dot"


@pytest.mark.parametrize("metadata", ["", "{}", '{op_name="x"}', "{stack_frame_id=9}"])
def test_no_source_is_none(metadata):
    tables = StackTables.read({**TABLES, "StackFrames": PLAIN})
    assert tables.source(metadata) is None


def test_a_stack_that_turns_on_itself_ends():
    frames = [
        *PLAIN,
        "3 {file_location_id=2 parent_frame_id=4}",
        "4 {file_location_id=1 parent_frame_id=3}",
    ]
    tables = StackTables.read({**TABLES, "StackFrames": frames})
    assert [s.line for s in tables.stack(3)] == [20, 10]


@pytest.mark.parametrize("name", ["cpu-jax010-ring", "cpu-jax012-ring", "gpu-jax012-ring"])
def test_the_permute_leads_to_the_users_line(name):
    module = parse(stored(name))
    permutes = [i for c in module for i in module[c] if i.opcode.startswith("collective-permute")]
    assert permutes
    for i in permutes:
        source = module.source(i)
        assert (source.file, source.line) == ("hlo_programs.py", line_of("permute"))
        assert source.function.endswith("step")
