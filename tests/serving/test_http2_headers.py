import random

import hpack
import pytest

from hurtle.serving.grpc.http2_frames import ConnectionFailed, ErrorCode, encode_headers
from hurtle.serving.grpc.http2_headers import _STATIC, HeaderDecoder, decode_huffman

NAMES = [":method", ":path", "content-type", "te", "x-a", "grpc-timeout", "authorization", "user-agent"]


def decoder():
    return HeaderDecoder(lambda fields: list(fields))


def code_of(block):
    with pytest.raises(ConnectionFailed) as raised:
        decoder().decode(block)
    return raised.value.code


def test_it_decodes_what_the_hpack_package_encodes_whatever_the_tables_hold():
    rng = random.Random(4)
    for _ in range(30):
        encoder, ours = hpack.Encoder(), decoder()
        for _ in range(80):
            if rng.random() < 0.05:
                encoder.header_table_size = rng.choice((0, 50, 200, 4096))
            fields = [
                (rng.choice(NAMES), rng.choice(("POST", "/", "application/grpc", "v" * rng.randrange(300), str(rng.random()))))
                for _ in range(rng.randrange(1, 8))
            ]
            fields = [hpack.NeverIndexedHeaderTuple(*field) if rng.random() < 0.1 else field for field in fields]
            block = encoder.encode(fields, huffman=rng.random() < 0.7)
            assert ours.decode(block) == [(name.encode(), value.encode()) for name, value in fields]


def test_it_agrees_with_the_hpack_package_on_damaged_blocks():
    rng, agreed, refused = random.Random(5), 0, 0
    for _ in range(1500):
        encoder, ours, theirs = hpack.Encoder(), decoder(), hpack.Decoder()
        for _ in range(3):
            block = bytearray(encoder.encode([(rng.choice(NAMES), str(rng.random())) for _ in range(4)]))
            if rng.random() < 0.6:
                block[rng.randrange(len(block))] = rng.randrange(256)
            try:
                wanted = [tuple(field) for field in theirs.decode(bytes(block), raw=True)]
            except hpack.HPACKError:
                with pytest.raises(ConnectionFailed):
                    ours.decode(bytes(block))
                refused += 1
                break
            assert ours.decode(bytes(block)) == wanted
            agreed += 1
    assert agreed > 1000
    assert refused > 300


def test_the_same_bytes_mean_something_else_after_the_table_has_changed():
    ours = decoder()
    assert ours.decode(b"\x40\x01a\x011") == [(b"a", b"1")]
    assert ours.decode(b"\xbe") == ours.decode(b"\xbe") == [(b"a", b"1")]
    ours.decode(b"\x40\x01b\x012")
    assert ours.decode(b"\xbe") == [(b"b", b"2")]
    ours.decode(b"\x20")
    with pytest.raises(ConnectionFailed):
        ours.decode(b"\xbe")


def test_what_is_made_of_a_block_is_made_once_while_the_table_stays():
    made = []
    ours = HeaderDecoder(lambda fields: made.append(fields) or len(made))
    block = encode_headers([(b":status", b"200"), (b"x", b"y")])
    assert [ours.decode(block) for _ in range(3)] == [1, 1, 1]
    for n in range(1000):
        ours.decode(encode_headers([(b"n", b"%d" % n)]))
    assert len(ours._heads) <= 64


def test_an_entry_that_does_not_fit_empties_the_table():
    ours = decoder()
    ours.decode(b"\x40\x01a\x011")
    ours.decode(b"\x40\x01b" + encode_headers([(b"", b"v" * 5000)])[2:])
    with pytest.raises(ConnectionFailed):
        ours.decode(b"\xbe")


@pytest.mark.parametrize(
    "block", [b"\x80", b"\xbe", b"\xff\x00", b"\x00\x05ab", b"\x40", b"\x00\x01a", b"\xff" * 9, b"\x82\x20", b"\x3f\xe2\x1f"]
)
def test_nonsense_is_a_compression_error(block):
    assert code_of(block) is ErrorCode.COMPRESSION_ERROR


def test_a_list_that_is_too_long_is_stopped():
    assert code_of(b"\x82" * 5000) is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [0, 126, 127, 128, 254, 255, 300, 20_000])
def test_what_we_encode_can_be_decoded(size):
    fields = [(b":status", b"200"), (b"n" * size, b"v" * size)]
    assert [tuple(field) for field in hpack.Decoder().decode(encode_headers(fields), raw=True)] == fields


def test_the_private_huffman_decoder_of_hpack_is_the_one_that_its_public_decoder_uses():
    """`decode_huffman` is not part of hpack's API: this fails if a version that pyproject.toml allows changes it."""
    for text in (b"a", b"grpc-timeout", b"application/grpc+proto;q=0.1", bytes(range(32, 127)), b"\x00\xff"):
        block = hpack.Encoder().encode([(b"x", text)], huffman=True)
        ((name, value),) = hpack.Decoder().decode(block, raw=True)
        assert (name, value) == (b"x", text)
        assert decoder().decode(block) == [(b"x", text)]
    with pytest.raises(hpack.HPACKDecodingError):
        decode_huffman(b"\xff\xff\xff\xff")
    assert decode_huffman(bytes.fromhex("f1e3c2e5f23a6ba0ab90f4ff")) == b"www.example.com"  # RFC 7541, C.4.1


def test_the_static_table_is_rfc_7541_s():
    assert len(_STATIC) == 61
    assert [_STATIC[n - 1] for n in (1, 8, 31, 61)] == [
        (b":authority", b""),
        (b":status", b"200"),
        (b"content-type", b""),
        (b"www-authenticate", b""),
    ]
