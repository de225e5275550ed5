import gzip
import re

import pytest
from hlotools import FIXTURES, NAMES, hlo, stored

from collmm.errors import HloError
from collmm.hlo.cost import estimated_cycles, exec_time_us
from collmm.hlo.parse import parse

SMALL = hlo(
    """
    %sum (x.1: f32[], y.1: f32[]) -> f32[] {
      %x.1 = f32[] parameter(0)
      %y.1 = f32[] parameter(1)
      ROOT %add.1 = f32[] add(%x.1, %y.1)
    }

    ENTRY %main (p: f32[8,4]) -> f32[8,4] {
      %p = f32[8,4]{1,0} parameter(0), metadata={op_name="x"}
      ROOT %all-reduce = f32[8,4] all-reduce(%p), channel_id=1, replica_groups={}, to_apply=%sum
    }
    """
)


@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_the_stored_texts_reads(name):
    """Operands are defined before use, callees exist, and parameters agree with the header."""
    text = stored(name.partition(".")[0])
    module = parse(text)
    lines = text.split("\n")
    headers = {m[1]: m[0] for m in (re.match(r"(?:ENTRY )?%?(\S+) \(.*\{$", t) for t in lines) if m}
    assert set(module) == set(headers)
    seen = 0
    for computation_name in module:
        computation = module[computation_name]
        assert computation.root.is_root
        defined = set()
        for i in computation:
            if "#" in i.name:  # an element that the text names where it is used
                defined.add(i.name)
                assert i.operands[0] in defined
                continue
            assert (
                lines[i.line - 1].removeprefix("  ").removeprefix("ROOT ").startswith(f"%{i.name} ")
            )
            assert set(i.operands) <= defined, i
            defined.add(i.name)
            assert i.shape.bytes >= 0
            assert str(i.shape) in re.sub(r"/\*.*?\*/", "", lines[i.line - 1])
            assert all(c in module for names in i.called().values() for c in names)
            if "backend_config=" in lines[i.line - 1]:
                assert i.backend_config
            seen += 1
        parameters = [i for i in computation if i.opcode == "parameter"]
        arguments = headers[computation_name].partition(" (")[2].partition(" -> ")[0]
        assert len(parameters) == len(re.findall(r"[\w.\-]+: ", arguments))
    assert seen == sum(1 for t in lines if re.match(r"  (ROOT )?%", t))


def test_header_and_entry():
    module = parse(stored("v5e-jax012-windowed"))
    assert module.name == "jit_mlp"
    assert module.is_scheduled
    assert (module.num_partitions, module.replica_count) == (8, 1)
    assert module.entry is module[module.entry_name]
    assert module.entry.is_entry
    assert module.attrs["entry_computation_layout"].startswith("{(bf16[1024,2048]")


def test_a_path_reads_like_its_text(tmp_path):
    path = tmp_path / "m.hlo"
    path.write_text(SMALL)
    zipped = tmp_path / "m.hlo.gz"
    zipped.write_bytes(gzip.compress(SMALL.encode()))
    for given in (SMALL, path, str(path), zipped, SMALL.replace("\n", "\r\n")):
        module = parse(given)
        assert list(module) == ["sum", "main"]
        assert module["main"]["all-reduce"].called() == {"to_apply": ("sum",)}


def test_a_mapped_file_reads_like_its_text(tmp_path, monkeypatch):
    monkeypatch.setattr("collmm.hlo.parse._MAPPED", 0)
    path = tmp_path / "m.hlo"
    path.write_text(SMALL)
    assert [i.name for i in parse(path).entry] == ["p", "all-reduce"]


def test_attributes_with_commas_brackets_and_strings():
    text = SMALL.replace(
        "replica_groups={}",
        "replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'b'}, "
        'metadata={op_name="f(x)[{, \\"q\\"" stack_frame_id=3}, slice={[0:1], [2:3]}',
    )
    attrs = parse(text).entry.root.attrs
    assert attrs["replica_groups"] == "mesh['a'=2,'b'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'b'}"
    assert attrs["slice"] == "{[0:1], [2:3]}"
    assert attrs["metadata"] == '{op_name="f(x)[{, \\"q\\"" stack_frame_id=3}'
    assert attrs["to_apply"] == "%sum"


def test_names_without_percent_and_operands_with_shapes():
    text = hlo(
        """
        ENTRY main {
          p = (f32[8]{0}, s32[]) parameter(0)
          g = f32[8]{0} get-tuple-element((f32[8]{0}, /*index=1*/s32[]) p), index=0
          ROOT a = f32[8]{0} add(f32[8]{0} g, f32[8]{0:T(8)S(1)} g)
        }
        """
    )
    main = parse(text).entry
    assert main["a"].operands == ("g", "g")
    assert main["g"].operands == ("p",)
    assert main["p"].operands == ()


def test_backend_config_in_its_older_spelling():
    text = SMALL.replace("channel_id=1", 'channel_id=1, backend_config="{\\"a\\":{\\"b\\":[1,2]}}"')
    assert parse(text).entry.root.backend_config == {"a": {"b": [1, 2]}}


@pytest.mark.parametrize("config", ["{eps = 9.99e-07 : f32}", '"not json"', "3"])
def test_a_backend_config_that_is_no_json_object_is_empty(config):
    text = SMALL.replace("channel_id=1", f"channel_id=1, backend_config={config}")
    assert parse(text).entry.root.backend_config == {}


def test_costs_are_read_from_the_backend_config():
    cycles = [c for i in parse(stored("v5e-jax012-mlp")).entry if (c := estimated_cycles(i))]
    assert max(cycles) > 100_000
    matmul = parse(stored("gpu-jax012-mlp")).entry["cublas-lt-matmul.1"]
    assert exec_time_us(matmul) == pytest.approx(53.376)
    assert estimated_cycles(matmul) is None
    assert exec_time_us(parse(SMALL).entry.root) is None


def test_few_computations_are_kept(monkeypatch):
    monkeypatch.setattr("collmm.hlo.parse._KEPT", 3000)
    module = parse(stored("v5e-jax012-grid"))
    for name in module:
        assert module[name].name == name
    assert len(module._kept) < len(module) / 4
    assert sum(len(module.text(n)) for n in module._kept) == module._kept_size


NOT_HLO = [
    ("", 1, "HloModule"),
    ("\n\n", 3, "HloModule"),
    ("module @jit_f attributes {mhlo.num_partitions = 8 : i32} {\n}\n", 1, "HloModule"),
    ("{ lambda ; a:f32[8]. let b = sin a in (b,) }\n", 1, "HloModule"),
    ("\x00\x01\x02\nbinary", 1, "HloModule"),
    ("HloModule m\n\nthis is prose, not HLO\n", 3, "a computation"),
    ('HloModule m\n\nFileNames\n1 "a.py"\n', 5, "ENTRY"),
    ("HloModule m, attrs={{\n", 1, "brackets"),
]


@pytest.mark.parametrize(("text", "line", "wanted"), NOT_HLO)
def test_foreign_text_is_refused_with_its_line(text, line, wanted):
    text = text or " "
    with pytest.raises(HloError, match=rf"line {line}: .*{wanted}"):
        parse(text + "\n")


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(HloError, match=r"cannot read .*nowhere.hlo"):
        parse(tmp_path / "nowhere.hlo")
    (tmp_path / "empty").write_text("")
    with pytest.raises(HloError, match=r"empty: line 1: expected 'HloModule"):
        parse(tmp_path / "empty")
    with pytest.raises(HloError, match="empty text"):
        parse("")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(SMALL.encode())[:-20])
    with pytest.raises(HloError, match=r"cannot read .*cut.gz"):
        parse(tmp_path / "cut.gz")


@pytest.mark.parametrize("name", ["cpu-jax012-mlp", "v5e-jax012-reduced"])
def test_text_cut_off_anywhere_is_refused(name):
    """A prefix of a module never passes for one, and the error names a line within it."""
    text = stored(name)
    end = text.rindex("\n}")  # from here on nothing is missing
    for cut in range(1, end, 97):
        part = text[:cut]
        if "\n" not in part:
            part += "\n"
        with pytest.raises(HloError) as caught:
            parse(part)
        found = re.search(r"line (\d+)", str(caught.value))
        assert found, caught.value
        assert 1 <= int(found[1]) <= part.count("\n") + 1
    parse(text[: end + 2])


def test_cut_inside_the_entry_says_so():
    cut = SMALL[: SMALL.index(" all-reduce(")]
    with pytest.raises(
        HloError, match=r"line 11: the text ends inside computation main \(line 9\)"
    ):
        parse(cut)


BAD_LINES = [
    ("ROOT %all-reduce = f32[8,4]{1,0}", "an opcode"),
    ("%all-reduce f32[8,4]{1,0} all-reduce(%p)", "'%name = shape opcode"),
    ("ROOT %all-reduce = (f32[8,4]{1,0} all-reduce(%p", "closes"),
    ("ROOT %all-reduce = f32[8,4]{1,0} all-reduce(%p", "closes"),
    ("ROOT %all-reduce = q9[8,4]{1,0} all-reduce(%p)", "element type"),
    ("ROOT %all-reduce = f32[8,x]{1,0} all-reduce(%p)", "a dimension"),
    ("ROOT %all-reduce = f32[8,4]{1,0} all-reduce(%p), channel_id={", "brackets"),
    ("ROOT %all-reduce = f32[8,4]{1,0} all-reduce(%p), 17", "an attribute"),
]


@pytest.mark.parametrize(("bad", "wanted"), BAD_LINES)
def test_a_bad_instruction_is_refused_with_its_line(bad, wanted):
    start = SMALL.index("ROOT %all-reduce")
    text = SMALL[:start] + bad + SMALL[SMALL.index("\n", start) :]

    def read_all():
        for i in parse(text).entry:
            assert i.shape.bytes
            assert i.attrs is not None

    with pytest.raises(HloError, match=rf"line 11: .*{re.escape(wanted)}"):
        read_all()


def test_unknown_names_are_refused():
    module = parse(SMALL)
    with pytest.raises(HloError, match="no computation 'other'"):
        module["other"]
    with pytest.raises(HloError, match=r"line 9: computation main uses 'q'"):
        module.entry["q"]


def test_a_computation_defined_twice_is_refused():
    twice = SMALL.replace("%main", "%sum")
    with pytest.raises(HloError, match=r"line 9: computation sum is defined twice"):
        parse(twice)


def test_a_schedule_is_required_only_when_asked_for():
    module = parse(SMALL.replace("is_scheduled=true, ", ""))
    assert not module.is_scheduled
    with pytest.raises(HloError, match=r"line 1: expected is_scheduled=true"):
        module.require_schedule()


def test_fixture_folder_is_small():
    assert sum(p.stat().st_size for p in FIXTURES.iterdir()) < 400_000


ELEMENTS = """
ENTRY %main (p: ((f32[2], f32[3]), f32[4])) -> f32[3] {
  %p = ((f32[2]{0}, f32[3]{0}), f32[4]{0}) parameter(0)
  %a = f32[3]{0} negate(%p#0#1)
  %b = f32[4]{0} negate(%p#1)
  ROOT %c = f32[3]{0} add(%a, %p#0#1)
}
"""


def test_elements_named_where_they_are_used_are_spelled_out():
    entry = parse(hlo(ELEMENTS)).entry
    assert [i.name for i in entry] == ["p", "p#0", "p#0#1", "a", "p#1", "b", "c"]
    inner = entry["p#0#1"]
    assert (inner.opcode, inner.operands, inner.attrs) == (
        "get-tuple-element",
        ("p#0",),
        {"index": "1"},
    )
    assert (str(inner.shape), inner.line, inner.is_root) == ("f32[3]{0}", entry["a"].line, False)
    assert [i.name for i in entry.operands(entry["c"])] == ["a", "p#0#1"]


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        ("p#0#2", r"line 5: 'p#0' has 2 elements and no 'p#0#2'"),
        ("p#1#0", r"line 5: 'p#1' has 0 elements and no 'p#1#0'"),
    ],
)
def test_an_element_that_a_tuple_lacks_is_named_with_its_line(operand, message):
    with pytest.raises(HloError, match=message):
        parse(hlo(ELEMENTS.replace("p#0#1", operand, 1))).entry  # noqa: B018


def test_an_element_of_what_is_not_defined_is_named():
    with pytest.raises(HloError, match="line 6: 'b' uses 'q#1', which computation main does not"):
        parse(hlo(ELEMENTS.replace("%p#1", "%q#1"))).entry  # noqa: B018


@pytest.mark.parametrize("operand", ["nowhere", "later"])
def test_an_operand_that_nothing_before_it_defines_is_named_with_its_line(operand):
    text = hlo("""
        ENTRY %main (p: f32[8]) -> f32[8] {
          %p = f32[8]{0} parameter(0)
          %x = f32[8]{0} negate(%OPERAND)
          %later = f32[8]{0} negate(%p)
          ROOT %r = f32[8]{0} add(%x, %later)
        }
    """)
    message = f"line 5: 'x' uses {operand!r}, which computation main does not define before it"
    with pytest.raises(HloError, match=message):
        parse(text.replace("OPERAND", operand)).entry  # noqa: B018
    assert len(parse(text.replace("OPERAND", "p")).entry) == 4


def test_a_computation_that_is_not_there_is_named_with_the_line_that_needs_it():
    text = hlo(ELEMENTS.replace("negate(%p#1)", "call(%p#1), to_apply=%gone"))
    with pytest.raises(HloError, match=r"line 6: the text has no computation 'gone'"):
        parse(text)["gone"]


def test_a_message_about_a_line_of_any_length_is_short():
    text = hlo(ELEMENTS.replace("f32[4]{0} negate", f"f32[{'4' * 10**6}x]{{0}} negate"))
    with pytest.raises(HloError, match="line 6: ") as caught:
        parse(text).entry["b"].shape  # noqa: B018
    assert len(str(caught.value)) < 500
