"""A reader of TensorBoard's event files: records, their checksums, and what a restart takes back."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog

_TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    _TABLE.append(byte)


def _masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecord files keep it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(path: Path):
    """Yield the events of a file; a record that a kill cut off ends it."""
    data = path.read_bytes()
    while len(data) >= 16:
        length, crc = struct.unpack("<QI", data[:12])
        assert crc == _masked_crc(data[:8])
        record, rest = data[12 : 12 + length], data[12 + length :]
        if len(rest) < 4:
            return
        assert struct.unpack("<I", rest[:4])[0] == _masked_crc(record)
        yield Event.FromString(record)
        data = rest[4:]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of every tag in the order they were written, as TensorBoard shows them."""
    found: dict[str, list[tuple[int, float]]] = {}
    files = sorted(folder.glob("events.out.tfevents.*"))
    assert files, f"no event file in {folder}"
    for event in (event for file in files for event in events(file)):
        if event.session_log.status == SessionLog.START:
            found = {tag: [point for point in points if point[0] < event.step] for tag, points in found.items()}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
