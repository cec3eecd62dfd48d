"""Writes golden.json: what Python makes of JSON texts, for pyjson's tests.

Run `python3 golden.py > golden.json`. The texts are random with a fixed seed;
each row is [text, printed], printed null where Python cannot print it.
"""
import json
import random
import struct

rnd = random.Random(20260701)


def number():
    kind = rnd.randrange(7)
    if kind == 0:
        return str(rnd.randrange(-10**rnd.randrange(1, 40), 10**rnd.randrange(1, 40)))
    if kind == 1:  # any double at all
        f = struct.unpack("<d", struct.pack("<Q", rnd.getrandbits(64)))[0]
        return repr(f) if f == f and abs(f) != float("inf") else "1e400"
    if kind == 2:  # more digits than a double has
        return "%d.%de%d" % (rnd.randrange(100), rnd.randrange(10**20), rnd.randrange(-330, 312))
    if kind == 3:  # where the notation changes
        return "%s%de%s%d" % (rnd.choice(["", "-"]), rnd.randrange(10**rnd.randrange(1, 18)), rnd.choice(["", "+", "-"]), rnd.randrange(22))
    if kind == 4:
        return rnd.choice(["0", "-0", "0.0", "-0.0", "0e0", "-0e5", "1E2", "1e+2", "5e-324", "2e-324", "1.7976931348623157e308", "1.7976931348623159e308", "9007199254740993.0"])
    if kind == 5:
        return "%d.0" % rnd.randrange(10**rnd.randrange(1, 20))
    return "%.*f" % (rnd.randrange(1, 20), rnd.uniform(-1, 1) * 10**rnd.randrange(-8, 18))


def string():
    out = []
    for _ in range(rnd.randrange(6)):
        kind = rnd.randrange(6)
        if kind == 0:
            out.append("\\u%04x" % rnd.choice([rnd.randrange(0x10000), rnd.randrange(0xD800, 0xE000), rnd.randrange(0x80)]))
        elif kind == 1:
            out.append("\\u%04X\\u%04X" % (rnd.randrange(0xD800, 0xDC00), rnd.randrange(0xDC00, 0xE000)))
        elif kind == 2:
            out.append("\\" + rnd.choice('"\\/bfnrt'))
        elif kind == 3:
            c = chr(rnd.randrange(0x20, 0x110000))
            out.append("?" if "\ud800" <= c <= "\udfff" or c in '"\\' else c)
        else:
            out.append(rnd.choice("abcZ_~ <&>/\x7f\u00e9\u2028\uffff\U00010437"))
    return '"' + "".join(out) + '"'


def value(depth):
    kind = rnd.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return number()
    if kind < 4:
        return string()
    if kind == 4:
        return rnd.choice(["null", "true", "false"])
    space = rnd.choice(["", "", " ", "\t\r\n"])
    if kind == 5:
        return "[" + space + ("," + space).join(value(depth + 1) for _ in range(rnd.randrange(5))) + "]"
    names = [string() for _ in range(3)]
    pairs = [rnd.choice(names + [string()]) + space + ":" + value(depth + 1) for _ in range(rnd.randrange(6))]
    return "{" + ",".join(pairs) + space + "}"


def printed(text):
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except ValueError:
        return None


bad = ["", " ", "01", "-", "1.", ".5", "+1", "1e", "1e+", "0x1", "nul", "nulll", "True", "[1,]", "[,1]", "[1 2]", "[", "{", '{"a"}', '{"a":}', '{"a":1,}',
       '{a:1}', "{'a':1}", '"', '"\\x"', '"\\u12"', '"\\u12g4"', '"a\nb"', '"\x00"', "[1]]", "NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"\\', "\ufeff1", "1_0", "[NaN]"]
rows = [[t, printed(t)] for t in bad + [value(0) for _ in range(1200)] + ['{"k":%s}' % number() for _ in range(800)]]
print("[" + ",\n".join(json.dumps(r) for r in rows) + "]")
