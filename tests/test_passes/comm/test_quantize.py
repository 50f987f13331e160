"""Values in blocks: what comes back, and how far off it may be."""

import shardtrace  # noqa: F401
from passes.comm.quantized import FLOATS, FP8, INT4, INT8, Format

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

CHUNK = 1024
FP8_E5M2 = Format("fp8_e5m2", largest=57344, bits=8, block=256, is_float=True)
FINENESS = {448: (16, 1024), 57344: (8, 2**17)}  # of a float format: its error as parts of a value, and of a scale
FORMATS = pytest.mark.parametrize("format", [INT8, INT4, FP8, FP8_E5M2], ids=lambda format: format.name)
INTEGERS = pytest.mark.parametrize("format", [INT8, INT4], ids=lambda format: format.name)


def packed(format, values, **options):
    message = torch.full((format.nbytes(len(values)),), 255, dtype=torch.uint8)
    format.pack(values.unsqueeze(0), format.messages(message.unsqueeze(0)), chunk=CHUNK, **options)
    return message


def unpacked(format, message, count, dtype=torch.float32):
    values = torch.full((1, count), 7.0, dtype=dtype)
    format.unpack(format.messages(message.unsqueeze(0)), values, chunk=CHUNK)
    return values[0]


def round_trip(format, values):
    return unpacked(format, packed(format, values), len(values), values.dtype)


def scales(format, values):
    """The scale of each value, by theory."""
    blocks = torch.nn.functional.pad(values.float(), (0, -len(values) % format.block)).view(-1, format.block)
    return (blocks.abs().amax(1) / format.largest).repeat_interleave(format.block)[: len(values)]


@FORMATS
@pytest.mark.parametrize("count", [1, 127, 128, 256, 1000, 5000])
def test_error_is_bounded(format, count):
    torch.manual_seed(count)
    values = torch.randn(count) * 10 ** torch.empty(count).uniform_(-3, 3)
    error = (round_trip(format, values) - values).abs()
    bound = scales(format, values) / 2
    if format.is_float:
        of_value, of_scale = FINENESS[format.largest]
        bound = torch.maximum(values.abs() / of_value, scales(format, values) / of_scale)
    assert (error <= bound * (1 + 1e-5)).all()


@FORMATS
def test_representable_values_come_back_exactly(format):
    codes = torch.tensor([-7.0, -2, -1, 0, 1, 4, 7]).repeat(200) if format is INT4 else torch.arange(-127.0, 128)
    if format.is_float:
        codes = torch.arange(256, dtype=torch.uint8).view(FLOATS[format.largest]).float().nan_to_num(0, 0, 0)
        codes = codes.repeat(3)[: len(codes) * 3 // format.block * format.block]
    for power in (-20, 0, 15):
        assert torch.equal(round_trip(format, codes * 2.0**power), codes * 2.0**power)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(format, dtype):
    values = torch.randn(700).to(dtype)
    got = round_trip(format, values).float()
    exact = unpacked(format, packed(format, values.float()), 700)
    assert torch.equal(got, exact.to(dtype).float())


@FORMATS
def test_zeros_and_tiny_values(format):
    assert not round_trip(format, torch.zeros(300)).any()
    assert round_trip(format, torch.full((300,), 1e-38)).abs().max() <= 1e-30


@FORMATS
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_with_an_overflow_is_not_finite(format, bad):
    values = torch.randn(3 * format.block)
    values[format.block + 5] = bad
    blocks = round_trip(format, values).view(3, -1)
    assert not blocks[1].isfinite().any()
    assert blocks[[0, 2]].isfinite().all()


@FORMATS
def test_chunks_change_nothing(format):
    values, whole = torch.randn(5000), torch.empty(format.nbytes(5000), dtype=torch.uint8)
    format.pack(values.unsqueeze(0), format.messages(whole.unsqueeze(0)), chunk=2**20)
    assert torch.equal(whole, packed(format, values))
    assert torch.equal(FP8.nbytes(0) * torch.ones(1), torch.zeros(1))


@FORMATS
@pytest.mark.parametrize("count", [700, 768, 5000])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_rows_are_rounded_as_each_by_itself(format, rows, count):
    """To the bit, whatever the chunks: the rows of several ranks, with and without errors, side by side with others."""
    torch.manual_seed(0)
    values, errors = torch.randn(2, rows, count)
    errors = errors.bfloat16()
    bytes_ = torch.empty(rows, 16 + 2 * format.nbytes(count))  # messages of two members, then something else
    both = format.messages(bytes_.to(torch.uint8)[:, : 2 * format.nbytes(count)])
    blocks = format.blocks(count)
    for kept in (None, errors):
        lost = [{} if kept is None else {"error": error.unsqueeze(0)} for error in errors.clone()]
        expected = [packed(format, value, **options) for value, options in zip(values, lost, strict=True)]
        for chunk in (300, CHUNK, 2**20):
            mine = both.part(slice(blocks, 2 * blocks))
            format.pack(values, mine, chunk=chunk, error=None if kept is None else errors.clone())
            for r in range(rows):
                one = format.messages(expected[r].unsqueeze(0))
                assert torch.equal(mine.scales[r], one.scales[0])
                assert torch.equal(mine.codes[r], one.codes[0])
            found, alone = torch.ones(2, rows, count)
            format.unpack(mine, found, chunk=chunk)
            for r in range(rows):
                format.unpack(format.messages(expected[r].unsqueeze(0)), alone[r : r + 1], chunk=CHUNK)
            assert torch.equal(found, alone)


@FORMATS
@pytest.mark.parametrize("count", [700, 768, 5000])
def test_messages_are_added_up(format, count):
    """One after the other, to the bit; or at once, with other roundings."""
    values, sums = torch.randn(5, count), torch.ones(count)
    messages = format.messages(torch.stack([packed(format, v) for v in values]))
    expected, at_once = sums.clone(), sums.clone()
    whole = count // format.block * format.block
    for scales, codes in zip(*messages, strict=True):
        one = format._decode(codes[None])[0]
        blocks = expected[:whole].view(-1, format.block)
        blocks.addcmul_(one[: len(blocks)], scales[: len(blocks), None], value=0.3)
        expected[whole:].add_((one[-1] * scales[-1])[: count - whole], alpha=0.3)
    for chunk in (300, CHUNK, 2**20):
        found = sums.clone()
        format.add(messages, found, chunk=chunk, share=0.3)
        assert torch.equal(found, expected)
    format.add(messages, at_once, chunk=CHUNK, share=0.3, at_once=True)
    torch.testing.assert_close(at_once, expected)
    torch.testing.assert_close(expected, sums + 0.3 * sum(round_trip(format, v) for v in values))


@INTEGERS
def test_error_feedback_loses_nothing_over_steps(format):
    """What a step loses comes back in the next one: sums over steps are off by the last error only."""
    torch.manual_seed(0)
    error, sent, meant = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000), torch.zeros(1000)
    for _ in range(30):
        values = torch.randn(1000)
        meant += values
        sent += unpacked(format, packed(format, values, error=error.unsqueeze(0)), 1000)
    largest = 1.5 * 4 / format.largest / 2  # half a scale of a value and an error
    assert (sent + error.float() - meant).abs().max() < 0.02 * 30 / format.largest  # errors are kept in bf16
    assert (sent - meant).abs().max() < 2 * largest


@INTEGERS
def test_error_feedback_forgets_an_overflow(format):
    values = torch.randn(500)
    values[3] = float("inf")
    error = torch.zeros(500, dtype=torch.bfloat16)
    packed(format, values, error=error.unsqueeze(0))
    assert error.isfinite().all()
    assert not error[: format.block].any()


@pytest.mark.parametrize(("largest", "bits"), [(240, 8), (448, 4)])
def test_a_float_format_is_one_of_torchs(largest, bits):
    with pytest.raises(ValueError, match=r"'mine' of \d bits up to \d+ is not torch.float8_e4m3fn \(448\) or"):
        Format("mine", largest=largest, bits=bits, block=256, is_float=True)


@FORMATS
def test_bytes_of_a_message(format):
    per_block = 4 + format.block * format.bits // 8
    assert [format.nbytes(n) for n in (1, format.block, format.block + 1)] == [per_block, per_block, 2 * per_block]


class Counted(TorchDispatchMode):
    """Counts functions, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view or func is torch.ops.aten.new_empty.default:
            return result
        self.number += 1
        values = zip(func._schema.arguments, args, strict=False)
        given = [(a, t) for a, t in values if isinstance(t, torch.Tensor)]
        only_written = func in (torch.ops.aten.copy_.default, torch.ops.aten.zero_.default)
        for argument, t in given:
            updated = argument.alias_info is not None and argument.alias_info.is_write and not only_written
            self.bytes += t.nbytes * (2 if updated else 1)
        self.bytes += 0 if any(t is result for _, t in given) else result.nbytes
        return result


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_work_is_what_torch_is_asked_to_do(format, dtype):
    """Without the bytes of scales, which are about one in a hundred."""
    rows, count, width = 5, 3 * CHUNK, dtype.itemsize
    values, errors = torch.randn(rows, count).to(dtype), torch.zeros(rows, count, dtype=torch.bfloat16)
    messages = format.messages(torch.empty(rows, format.nbytes(count), dtype=torch.uint8))
    sums, options = torch.zeros(count), {"rows": rows, "chunk": CHUNK}
    for expected, run in (
        (format.pack_work(count, width, **options), lambda: format.pack(values, messages, chunk=CHUNK)),
        (
            format.pack_work(count, width, error=True, **options),
            lambda: format.pack(values, messages, chunk=CHUNK, error=errors),
        ),
        (format.unpack_work(count, width, **options), lambda: format.unpack(messages, values, chunk=CHUNK)),
        (format.add_work(count, **options), lambda: format.add(messages, sums, chunk=CHUNK, share=0.5)),
        (
            format.add_work(count, at_once=True, **options),
            lambda: format.add(messages, sums, chunk=CHUNK, share=0.5, at_once=True),
        ),
    ):
        with Counted() as counted:
            run()
        assert counted.number == expected.number
        assert counted.bytes == pytest.approx(expected.bytes, rel=0.03)
