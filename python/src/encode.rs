//! A state dict to the JSON tree that `ringstow._state.tree._encode` describes: its containers, its scalars and the
//! usual tensors. It calls `ringstow._state.tree._encode` for all other values, which are rare.
//!
//! A state has thousands of tensors, and training stands still while they are looked at: from Python it
//! takes several times as long.

use crate::error::to_python;
use crate::exchange::Exchange;
use crate::tensors::Tensors;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyMapping, PyString, PyTuple};
use ringstow::Error;
use std::borrow::Cow;

/// Deep enough for any configuration; shallow enough for every reader's recursion limit.
pub(crate) const DEPTH_MAX: usize = 200;
/// Every reader of JSON takes a number up to this for the integer that it is.
const INT_MAX: u64 = 1 << 53;

/// Items of a dict that are counted ahead.
const MANY: usize = 1000;

/// Most tensors that room is made for ahead.
const ROOM_MAX: usize = 1 << 17;

type Value<'py> = Bound<'py, PyAny>;

/// The tree of a state dict. Its tensors are added to those that are given.
#[pyfunction]
pub(crate) fn encode<'py>(
    state: &Value<'py>,
    tensors: &Bound<'py, Tensors>,
    others: &Value<'py>,
) -> PyResult<String> {
    let exchange: Option<Bound<'py, Exchange>> = others.getattr("exchange")?.extract()?;
    let mut encoder = Encoder {
        tensors,
        exchange: exchange.as_ref().map(Bound::get),
        address_of: others.getattr("address_of")?,
        others,
        tree: Vec::new(),
        path: Vec::new(),
        name: String::new(),
        open: Vec::new(),
    };
    encoder.value(state)?;
    Ok(String::from_utf8(encoder.tree)?)
}

struct Encoder<'a, 'py> {
    tensors: &'a Bound<'py, Tensors>,
    exchange: Option<&'a Exchange>,
    address_of: Value<'py>,
    others: &'a Value<'py>,
    /// The text so far.
    tree: Vec<u8>,
    /// Where the value is that is being encoded.
    path: Vec<Value<'py>>,
    /// The same, joined by dots, as `ringstow._state.tree._encode.flat_name` does it.
    name: String,
    /// The containers that it is in.
    open: Vec<Value<'py>>,
}

impl<'py> Encoder<'_, 'py> {
    // Nesting goes through `value`, `inside` and `child`: what they leave to others, never inlined, is not on
    // the stack two hundred times. Threads may have small ones.

    fn value(&mut self, value: &Value<'py>) -> PyResult<()> {
        if self.usual_tensor(value)? || self.scalar(value)? {
            return Ok(());
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            self.inside(value, |encoder| encoder.array(list.iter()))
        } else if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            self.inside(value, |encoder| encoder.tagged("$tuple", |e| e.array(tuple.iter())))
        } else if let Ok(dict) = value.cast_exact::<PyDict>() {
            self.inside(value, |encoder| encoder.dict(dict))
        } else {
            self.rare(value)
        }
    }

    #[inline(never)]
    fn rare(&mut self, value: &Value<'py>) -> PyResult<()> {
        match self.other(value)? {
            Some(parts) => self.inside(value, |encoder| encoder.parts(&parts)),
            None => Ok(()),
        }
    }

    /// Tells whether it is one; then it is encoded.
    #[inline(never)]
    fn usual_tensor(&mut self, value: &Value<'py>) -> PyResult<bool> {
        let Some(exchange) = self.exchange else { return Ok(false) };
        let Some(plain) = exchange.look(value, &self.address_of)? else { return Ok(false) };
        let mut tensors = self.tensors.borrow_mut();
        let stored = tensors.add_plain(&self.name, plain, value.clone().unbind());
        self.tagged("$tensor", |encoder| quote(&mut encoder.tree, stored))?;
        Ok(true)
    }

    /// Tells whether JSON has it; then it is encoded.
    #[inline(never)]
    fn scalar(&mut self, value: &Value<'py>) -> PyResult<bool> {
        if let Ok(text) = value.cast_exact::<PyString>() {
            self.text(text)?;
        } else if let Some(text) = plain_scalar(value)? {
            self.put(&text);
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    /// Encodes what `ringstow._state.tree._encode` knows; returns the parts of a container, whose items are to come.
    #[inline(never)]
    fn other(&mut self, value: &Value<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let known = self.others.call_method1(intern!(value.py(), "value"), (value, self.at()?))?;
        if let Ok(text) = known.cast::<PyString>() {
            self.put(text.to_str()?);
            return Ok(None);
        }
        Ok(Some(known.cast_into()?))
    }

    /// Encodes a container of which its text is known, and its items are not.
    fn parts(&mut self, parts: &Bound<'py, PyTuple>) -> PyResult<()> {
        for part in parts {
            if let Ok(text) = part.cast::<PyString>() {
                self.put(text.to_str()?);
            } else if let Ok(list) = part.cast::<PyList>() {
                self.array(list.iter())?;
            } else if let Ok(fields) = part.cast::<PyTuple>() {
                self.object(fields.extract()?)?;
            } else {
                self.object_or_pairs(items_of(&part)?)?;
            }
        }
        Ok(())
    }

    /// Encodes a container by what encodes its items, unless it is in itself.
    fn inside(
        &mut self,
        container: &Value<'py>,
        encode: impl FnOnce(&mut Self) -> PyResult<()>,
    ) -> PyResult<()> {
        if self.contains_itself(container)? {
            self.put("null");
            return Ok(());
        }
        self.open.push(container.clone());
        encode(self)?;
        self.open.pop();
        Ok(())
    }

    /// Whether a container is in itself; then that is noted.
    #[inline(never)]
    fn contains_itself(&self, container: &Value<'py>) -> PyResult<bool> {
        if self.open.iter().any(|open| open.is(container)) {
            self.refuse(format!(
                "{} contains itself: leave the reference back out, or replace it by a name or a \
                 number",
                self.describe(&self.path)?
            ))?;
            return Ok(true);
        }
        if self.open.len() >= DEPTH_MAX {
            let begin = self.describe(&self.path[..4])?;
            return Err(invalid(format!("{begin}... is nested more than {DEPTH_MAX} levels deep")));
        }
        Ok(false)
    }

    /// Notes a value that cannot be saved: one error names all of them.
    fn refuse(&self, problem: String) -> PyResult<()> {
        self.others.call_method1(intern!(self.others.py(), "refuse"), (problem,))?;
        Ok(())
    }

    fn dict(&mut self, dict: &Bound<'py, PyDict>) -> PyResult<()> {
        let items: Vec<_> = dict.iter().collect();
        if items.len() >= MANY {
            // A large dict of numbers must not take memory for as many tensors.
            self.tensors.borrow_mut().make_room(items.len().min(ROOM_MAX));
        }
        match items.iter().all(|(key, _)| is_plain_key(key)) {
            true => self.object(items),
            false => self.tagged("$dict", |encoder| encoder.pairs(items)),
        }
    }

    fn object_or_pairs(&mut self, items: Vec<(Value<'py>, Value<'py>)>) -> PyResult<()> {
        match items.iter().all(|(key, _)| is_plain_key(key)) {
            true => self.object(items),
            false => self.pairs(items),
        }
    }

    fn object(&mut self, items: Vec<(Value<'py>, Value<'py>)>) -> PyResult<()> {
        self.put("{");
        for (number, (key, value)) in items.iter().enumerate() {
            self.comma_unless(number == 0);
            self.text(key.cast()?)?;
            self.put(":");
            self.child(key, value)?;
        }
        self.put("}");
        Ok(())
    }

    fn pairs(&mut self, items: Vec<(Value<'py>, Value<'py>)>) -> PyResult<()> {
        self.put("[");
        for (number, (key, value)) in items.iter().enumerate() {
            self.comma_unless(number == 0);
            if !is_number(key) && !key.is_exact_instance_of::<PyString>() {
                self.others.call_method1(intern!(key.py(), "check_key"), (key, self.at()?))?;
            }
            self.put("[");
            self.child(key, key)?;
            self.put(",");
            self.child(key, value)?;
            self.put("]");
        }
        self.put("]");
        Ok(())
    }

    fn array(&mut self, items: impl Iterator<Item = Value<'py>>) -> PyResult<()> {
        self.put("[");
        for (number, item) in items.enumerate() {
            self.comma_unless(number == 0);
            self.child(number.into_pyobject(item.py())?.as_any(), &item)?;
        }
        self.put("]");
        Ok(())
    }

    /// Encodes what is one step further on the path.
    fn child(&mut self, step: &Value<'py>, value: &Value<'py>) -> PyResult<()> {
        let end = self.name.len();
        self.extend_name(step)?;
        self.path.push(step.clone());
        self.value(value)?;
        self.path.pop();
        self.name.truncate(end);
        Ok(())
    }

    #[inline(never)]
    fn extend_name(&mut self, step: &Value<'py>) -> PyResult<()> {
        if !self.path.is_empty() {
            self.name.push('.');
        }
        if let Some(text) = step.cast_exact::<PyString>().ok().and_then(|text| text.to_str().ok()) {
            self.name.push_str(text);
            return Ok(());
        }
        let step = if step.is_instance_of::<PyString>() { step.str()? } else { step.repr()? };
        self.name.push_str(&step.to_string_lossy());
        Ok(())
    }

    fn tagged(
        &mut self,
        tag: &str,
        encode: impl FnOnce(&mut Self) -> PyResult<()>,
    ) -> PyResult<()> {
        self.put("{\"");
        self.put(tag);
        self.put("\":");
        encode(self)?;
        self.put("}");
        Ok(())
    }

    fn text(&mut self, text: &Bound<'py, PyString>) -> PyResult<()> {
        let Ok(valid) = text.to_str() else {
            let shown: String = text.repr()?.to_string_lossy().chars().take(80).collect();
            self.refuse(format!(
                "{} holds text that is not valid Unicode (a lone surrogate): {shown}; save it as \
                 bytes",
                self.describe(&self.path)?
            ))?;
            return quote(&mut self.tree, "");
        };
        quote(&mut self.tree, valid)
    }

    fn comma_unless(&mut self, is_first: bool) {
        if !is_first {
            self.put(",");
        }
    }

    fn put(&mut self, text: &str) {
        self.tree.extend_from_slice(text.as_bytes());
    }

    fn at(&self) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(self.others.py(), &self.path)
    }

    fn describe(&self, path: &[Value<'py>]) -> PyResult<String> {
        let path = PyTuple::new(self.others.py(), path)?;
        self.others.call_method1("describe", (path,))?.extract()
    }
}

fn invalid(problem: String) -> PyErr {
    to_python(Error::invalid(problem))
}

fn quote(tree: &mut Vec<u8>, text: &str) -> PyResult<()> {
    serde_json::to_writer(tree, text).map_err(|error| invalid(error.to_string()))
}

/// A dict's items in its own order, which of an OrderedDict is another than that of the dict that it is.
fn items_of<'py>(dict: &Value<'py>) -> PyResult<Vec<(Value<'py>, Value<'py>)>> {
    dict.cast::<PyMapping>()?.items()?.extract()
}

/// Whether JSON's objects may have this key, and it is not taken for a tag.
fn is_plain_key(key: &Value<'_>) -> bool {
    key.cast_exact::<PyString>()
        .is_ok_and(|key| !key.to_str().is_ok_and(|key| key.starts_with('$')))
}

/// The text of what JSON has as well, text excepted.
fn plain_scalar(value: &Value<'_>) -> PyResult<Option<Cow<'static, str>>> {
    if value.is_none() {
        return Ok(Some("null".into()));
    }
    if let Ok(flag) = value.cast_exact::<PyBool>() {
        return Ok(Some(if flag.is_true() { "true" } else { "false" }.into()));
    }
    if value.is_exact_instance_of::<PyInt>() {
        let number: Option<i64> = value.extract().ok();
        let number = number.filter(|number| number.unsigned_abs() <= INT_MAX);
        return Ok(number.map(|number| number.to_string().into()));
    }
    let Ok(number) = value.cast_exact::<PyFloat>() else { return Ok(None) };
    let text = number.value().is_finite().then(|| number.repr()).transpose()?;
    Ok(text.map(|text| text.to_string().into()))
}

fn is_number(value: &Value<'_>) -> bool {
    value.is_exact_instance_of::<PyInt>() || value.is_exact_instance_of::<PyFloat>()
}
