//! A checkpoint's JSON tree to a skeleton, as `ringstow._state.tree._skeleton` describes it.
//!
//! Python's own parser calls a function for every object, and a tensor is one: it takes five times as long.

use crate::node::Leaf;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyList, PyString, PyTuple};
use std::borrow::Cow;

type Value<'py> = Bound<'py, PyAny>;

/// Levels of JSON that are followed. Threads may have small stacks.
const DEPTH_MAX: usize = 100;
/// Digits of an integer that certainly fits.
const DIGITS_MAX: usize = 18;

/// The skeleton of a tree, or `None` for one with something unusual, which may be an error: that is for Python's own
/// parser. `tagged` makes a node of the items of an object whose first key is a tag, except a tensor's.
#[pyfunction]
pub(crate) fn parse_tree<'py>(text: &str, tagged: &Value<'py>) -> PyResult<Option<Value<'py>>> {
    let mut parser = Parser { text, at: 0, depth: 0, tagged, keys: Keys::default() };
    match parser.root() {
        Ok(root) => Ok(Some(root)),
        Err(Stop::Unusual) => Ok(None),
        Err(Stop::Raised(error)) => Err(error),
    }
}

enum Stop {
    /// What only Python's parser takes, or words an error for.
    Unusual,
    Raised(PyErr),
}

impl From<PyErr> for Stop {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

type Parsed<T> = Result<T, Stop>;

struct Parser<'a, 'py> {
    text: &'a str,
    at: usize,
    depth: usize,
    tagged: &'a Value<'py>,
    keys: Keys<'a, 'py>,
}

impl<'a, 'py> Parser<'a, 'py> {
    fn root(&mut self) -> Parsed<Value<'py>> {
        let root = self.value()?;
        match self.next() {
            None => Ok(root),
            Some(_) => Err(Stop::Unusual),
        }
    }

    fn py(&self) -> Python<'py> {
        self.tagged.py()
    }

    /// The next byte that is no white space. It stays the next.
    fn next(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = bytes.get(self.at) {
            self.at += 1;
        }
        bytes.get(self.at).copied()
    }

    fn expect(&mut self, wanted: u8) -> Parsed<()> {
        match self.take(wanted) {
            true => Ok(()),
            false => Err(Stop::Unusual),
        }
    }

    fn take(&mut self, wanted: u8) -> bool {
        let is_next = self.next() == Some(wanted);
        self.at += usize::from(is_next);
        is_next
    }

    fn value(&mut self) -> Parsed<Value<'py>> {
        match self.next() {
            Some(b'{') => self.nested(Self::object),
            Some(b'[') => self.nested(Self::list),
            Some(b'"') => Ok(PyString::new(self.py(), &self.string()?).into_any()),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.word("true", |py| PyBool::new(py, true).to_owned().into_any()),
            Some(b'f') => self.word("false", |py| PyBool::new(py, false).to_owned().into_any()),
            Some(b'n') => self.word("null", |py| py.None().into_bound(py)),
            _ => Err(Stop::Unusual),
        }
    }

    fn nested(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Parsed<Value<'py>>,
    ) -> Parsed<Value<'py>> {
        if self.depth == DEPTH_MAX {
            return Err(Stop::Unusual);
        }
        (self.at, self.depth) = (self.at + 1, self.depth + 1);
        let value = parse(self)?;
        self.depth -= 1;
        Ok(value)
    }

    /// What follows the bracket of a list.
    fn list(&mut self) -> Parsed<Value<'py>> {
        let mut items = Vec::new();
        if !self.take(b']') {
            loop {
                items.push(self.value()?);
                if !self.take(b',') {
                    break;
                }
            }
            self.expect(b']')?;
        }
        Ok(PyList::new(self.py(), items)?.into_any())
    }

    /// What follows the brace of an object.
    fn object(&mut self) -> Parsed<Value<'py>> {
        let dict = PyDict::new(self.py());
        if self.take(b'}') {
            return Ok(dict.into_any());
        }
        let mut key = self.key()?;
        if key.starts_with('$') {
            return self.tagged(key);
        }
        let mut count = 0;
        loop {
            let name = self.keys.get(self.tagged.py(), key);
            let value = self.value()?;
            dict.set_item(name, value)?;
            count += 1;
            if !self.take(b',') {
                break;
            }
            key = self.key()?;
        }
        self.expect(b'}')?;
        match dict.len() == count {
            true => Ok(dict.into_any()),
            false => Err(Stop::Unusual),
        }
    }

    /// What follows the first key of an object, which is a tag.
    fn tagged(&mut self, tag: Cow<'a, str>) -> Parsed<Value<'py>> {
        if tag == "$tensor" && self.next() == Some(b'"') {
            let name = self.string()?;
            self.expect(b'}')?;
            return Ok(Leaf::tensor(self.py(), self.keys.get(self.tagged.py(), name))?);
        }
        let (mut key, mut pairs) = (tag, Vec::new());
        loop {
            let name = self.keys.get(self.tagged.py(), key).into_any();
            pairs.push(PyTuple::new(self.py(), [name, self.value()?])?);
            if !self.take(b',') {
                break;
            }
            key = self.key()?;
        }
        self.expect(b'}')?;
        Ok(self.tagged.call1((pairs,))?)
    }

    fn key(&mut self) -> Parsed<Cow<'a, str>> {
        if self.next() != Some(b'"') {
            return Err(Stop::Unusual);
        }
        let key = self.string()?;
        self.expect(b':')?;
        Ok(key)
    }

    /// A string, whose quote is the next byte.
    fn string(&mut self) -> Parsed<Cow<'a, str>> {
        let (text, start) = (self.text, self.at + 1);
        let bytes = &text.as_bytes()[start..];
        let is_end = |&byte: &u8| matches!(byte, b'"' | b'\\' | 0..0x20);
        let mut end = bytes.iter().position(is_end).ok_or(Stop::Unusual)?;
        if bytes[end] == b'"' {
            self.at = start + end + 1;
            return Ok(Cow::Borrowed(&text[start..start + end]));
        }
        while bytes.get(end).is_some_and(|&byte| byte != b'"') {
            end += 1 + usize::from(bytes[end] == b'\\');
        }
        let literal = text.get(self.at..=start + end).ok_or(Stop::Unusual)?;
        self.at = start + end + 1;
        serde_json::from_str(literal).map(Cow::Owned).map_err(|_| Stop::Unusual)
    }

    fn number(&mut self) -> Parsed<Value<'py>> {
        let rest = &self.text[self.at..];
        let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
        let text = &rest[..rest.bytes().take_while(is_part).count()];
        self.at += text.len();
        let digits = text.strip_prefix('-').unwrap_or(text);
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            let number: f64 = serde_json::from_str(text).map_err(|_| Stop::Unusual)?;
            return Ok(PyFloat::new(self.py(), number).into_any());
        }
        if digits.len() > DIGITS_MAX || (digits.len() > 1 && digits.starts_with('0')) {
            return Err(Stop::Unusual);
        }
        let number: i64 = text.parse().map_err(|_| Stop::Unusual)?;
        Ok(number.into_pyobject(self.py()).map_err(PyErr::from)?.into_any())
    }

    fn word(
        &mut self,
        word: &str,
        value: impl FnOnce(Python<'py>) -> Value<'py>,
    ) -> Parsed<Value<'py>> {
        if !self.text[self.at..].starts_with(word) {
            return Err(Stop::Unusual);
        }
        self.at += word.len();
        Ok(value(self.py()))
    }
}

/// Texts that were met lately: many dicts have the same keys, and most tensors the name of their key.
struct Keys<'a, 'py>([Option<(&'a str, Bound<'py, PyString>)>; 64]);

impl Default for Keys<'_, '_> {
    fn default() -> Self {
        Self([const { None }; 64])
    }
}

impl<'a, 'py> Keys<'a, 'py> {
    fn get(&mut self, py: Python<'py>, text: Cow<'a, str>) -> Bound<'py, PyString> {
        let Cow::Borrowed(text) = text else { return PyString::new(py, &text) };
        let bytes = text.as_bytes();
        let sum = bytes.iter().rev().take(8).fold(bytes.len(), |sum, &b| sum * 31 + b as usize);
        let place = &mut self.0[sum % 64];
        match place {
            Some((known, string)) if *known == text => string.clone(),
            _ => place.insert((text, PyString::new(py, text))).1.clone(),
        }
    }
}
