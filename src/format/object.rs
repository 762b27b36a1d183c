//! What an object is, by its bytes: a value that PyTorch's DCP pickled with `torch.save`, or that ringstow packed (see
//! `python/ringstow/_state/tree/_packed_values.py`). Makes nothing of a pickle but numbers and text, and runs nothing of it.

use super::Value;
use serde::Deserialize;
use serde_json::value::RawValue;

/// What an object's bytes say.
#[derive(Debug, Clone, PartialEq)]
pub enum Object {
    /// The value itself: a number, text, or anything that ringstow packed.
    Value(Value),
    /// Its type, or the function that makes it: `a list`, `collections.OrderedDict`.
    Type(String),
}

impl Object {
    /// What the bytes say; `None` if they are neither, or a pickle of another protocol than `torch.save` writes.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        match unpacked(bytes) {
            Some(value) => Some(Self::Value(value)),
            None => of_pickle(pickle_in(bytes)?),
        }
    }
}

fn unpacked(bytes: &[u8]) -> Option<Value> {
    #[derive(Deserialize)]
    struct Header {
        #[serde(rename = "__metadata__")]
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Metadata {
        state: String,
    }
    let (len, rest) = bytes.split_first_chunk()?;
    let header = rest.get(..u64::from_le_bytes(*len).try_into().ok()?)?;
    let Header { metadata } = serde_json::from_slice(header).ok()?;
    let tree = RawValue::from_string(metadata.state).ok()?;
    match Value::from_json_with_types(&tree).ok()? {
        Value::Dict(mut items) if items.len() == 1 => items.pop().map(|(_, value)| value),
        _ => None,
    }
}

/// The pickle in a file of `torch.save`: a zip archive whose first entry, which is not compressed, is `data.pkl`.
fn pickle_in(bytes: &[u8]) -> Option<&[u8]> {
    let (head, rest) = bytes.split_first_chunk::<30>()?;
    let number = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    let (method, name, extra) = (number(8), number(26).into(), usize::from(number(28)));
    let is_it = head.starts_with(b"PK\x03\x04") && method == 0;
    let (name, rest) = rest.split_at_checked(name)?;
    rest.get(extra..).filter(|_| is_it && name.ends_with(b"/data.pkl"))
}

/// Walks the instructions up to the end. The first one makes the value, or the type or function that makes it, unless the
/// last one makes a tuple of all before.
fn of_pickle(pickle: &[u8]) -> Option<Object> {
    let (mut rest, mut count) = (pickle, 0);
    let (mut first, mut last) = (None, 0);
    loop {
        let (&code, after) = rest.split_first()?;
        let (argument, after) = after.split_at_checked(argument_len(code, after)?)?;
        rest = after;
        match code {
            b'.' => break,
            // The protocol, and notes of what was made.
            0x80 | b'q' | b'r' => {}
            code => {
                first = first.or(Some((code, argument)));
                (last, count) = (code, count + 1);
            }
        }
    }
    let (code, argument) = first?;
    if count == 1
        && let Some(value) = scalar(code, argument)
    {
        return Some(Object::Value(value));
    }
    let kind = match (last, code) {
        (b't' | 0x85..=0x87, _) | (_, b')') => "a tuple".into(),
        (_, b']') => "a list".into(),
        (_, b'}') => "a dict".into(),
        (_, b'c') => named(argument)?,
        _ => return None,
    };
    Some(Object::Type(kind))
}

/// Bytes of an instruction's argument; `None` for one that `torch.save` does not write.
fn argument_len(code: u8, after: &[u8]) -> Option<usize> {
    Some(match code {
        0x80 | b'K' | b'q' | b'h' => 1,
        b'M' => 2,
        b'J' | b'r' | b'j' => 4,
        b'G' => 8,
        0x8a => 1 + usize::from(*after.first()?),
        b'X' => usize::try_from(u32::from_le_bytes(*after.first_chunk()?)).ok()?.checked_add(4)?,
        b'c' => {
            let mut ends = after.iter().zip(1..).filter(|(byte, _)| **byte == b'\n');
            ends.nth(1)?.1
        }
        b'.'
        | b'('
        | b')'
        | b']'
        | b'}'
        | b'N'
        | b'Q'
        | b'R'
        | b'a'
        | b'b'
        | b'e'
        | b's'
        | b't'
        | b'u'
        | 0x81
        | 0x85..=0x89 => 0,
        _ => return None,
    })
}

fn scalar(code: u8, argument: &[u8]) -> Option<Value> {
    Some(match code {
        b'N' => Value::Null,
        0x88 => Value::Bool(true),
        0x89 => Value::Bool(false),
        b'K' => Value::Int(argument[0].into()),
        b'M' => Value::Int(u16::from_le_bytes(argument.try_into().ok()?).into()),
        b'J' => Value::Int(i32::from_le_bytes(argument.try_into().ok()?).into()),
        0x8a => Value::Int(signed(&argument[1..])?),
        b'G' => Value::Float(f64::from_be_bytes(argument.try_into().ok()?)),
        b'X' => Value::Str(std::str::from_utf8(&argument[4..]).ok()?.into()),
        _ => return None,
    })
}

/// A little-endian number in as few bytes as it needs.
fn signed(bytes: &[u8]) -> Option<i64> {
    let sign = bytes.last().map_or(0, |byte| if *byte < 0x80 { 0 } else { 0xff });
    let mut whole = [sign; 8];
    whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(i64::from_le_bytes(whole))
}

/// `module.name`, without the module of Python's own types.
fn named(argument: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(argument).ok()?;
    let (module, name) = text.trim_end().split_once('\n')?;
    Some(match (module, name) {
        // How protocol 2 writes bytes.
        ("_codecs", "encode") => "bytes".into(),
        ("__builtin__" | "builtins", name) => name.into(),
        _ => format!("{module}.{name}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The beginning of a file of `torch.save`.
    fn saved(pickle: &[u8]) -> Vec<u8> {
        let name = b"archive/data.pkl";
        let mut file = [&b"PK\x03\x04"[..], &[0; 22], &[name.len() as u8, 0, 3, 0]].concat();
        file.extend([name, &b"FB\0"[..], b"\x80\x02", pickle, b".rest"].concat());
        file
    }

    #[test]
    fn pickled_number_or_text_is_read_and_of_anything_else_the_type() {
        let value = |pickle: &[u8], value| {
            assert_eq!(Object::of(&saved(pickle)), Some(Object::Value(value)), "{pickle:?}");
        };
        value(b"K\x07", Value::Int(7));
        value(b"J\xfb\xff\xff\xff", Value::Int(-5));
        value(b"\x8a\x06\0\0\0\0\0\x01", Value::Int(1 << 40));
        value(b"\x8a\x02\0\x80", Value::Int(-32768));
        value(b"G\x3f\xf8\0\0\0\0\0\0", Value::Float(1.5));
        value(b"X\x01\0\0\0xq\0", Value::Str("x".into()));
        value(b"N", Value::Null);
        value(b"\x88", Value::Bool(true));
        let is = |pickle: &[u8], kind: &str| {
            assert_eq!(Object::of(&saved(pickle)), Some(Object::Type(kind.into())), "{pickle:?}");
        };
        is(b"]q\0K\x01a", "a list");
        is(b"}q\0", "a dict");
        is(b")", "a tuple");
        is(b"K\x01\x85q\0", "a tuple");
        is(b"]q\0]q\x01\x86q\x02", "a tuple");
        // Its last number ends with the bytes of a tuple's instruction.
        is(b"]q\0J\0\0\x85qa", "a list");
        is(
            b"ccollections\nOrderedDict\nq\0)Rq\x01X\x01\0\0\0aq\x02K\x01s",
            "collections.OrderedDict",
        );
        is(b"c__builtin__\nset\nq\0]q\x01K\x01a\x85q\x02Rq\x03", "set");
        is(b"c_codecs\nencode\nq\0X\x01\0\0\0xq\x01\x85q\x02Rq\x03", "bytes");
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_pickle_is_read_or_refused(pickle: Vec<u8>) {
            if let Some(Object::Value(value)) = Object::of(&saved(&pickle)) {
                proptest::prop_assert!(value.to_json().is_ok());
            }
        }
    }

    #[test]
    fn packed_value_is_read() {
        let header = br#"{"__metadata__":{"format":"ringstow","state":"{\"dt\":{\"$set\":[1]}}"}}"#;
        let packed = [&(header.len() as u64).to_le_bytes()[..], header, b"elements"].concat();
        let Some(Object::Value(Value::Other(fields))) = Object::of(&packed) else {
            panic!("{:?}", Object::of(&packed))
        };
        assert_eq!(fields[0].0, "$set");
    }

    #[test]
    fn bytes_that_are_cut_or_anything_else_say_nothing() {
        let whole = saved(b"X\x05\0\0\0abcde");
        let end = whole.len() - b".rest".len();
        (0..=end).for_each(|at| assert_eq!(Object::of(&whole[..at]), None, "cut at {at}"));
        for odd in [&b"\x8a\x09123456789"[..], b"X\xff\xff\xff\xffx", b"cos\n", b"\xff", b"Rq\0"] {
            assert_eq!(Object::of(&saved(odd)), None, "{odd:?}");
        }
        assert_eq!(Object::of(&[0xff; 100]), None);
    }
}
