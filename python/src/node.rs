//! Nodes of a skeleton, and the walk over one: see `ringstow._state.tree._walk`.
//!
//! The usual nodes are handled here: a tensor's leaf, dicts with plain keys, lists, tuples. All others are for
//! `ringstow._state.tree`. A state has thousands of tensors, and a walk in Python takes several times as long.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

type Value<'py> = Bound<'py, PyAny>;

/// A value that needs its tensor's bytes, torch, numpy, a type or pickle to be made.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Leaf {
    #[pyo3(get)]
    tag: Py<PyString>,
    #[pyo3(get)]
    pub(crate) body: Py<PyAny>,
    #[pyo3(get)]
    dtype: Py<PyString>,
    /// The number of its tensor among those of the checkpoint that is being loaded.
    number: AtomicU32,
}

#[pymethods]
impl Leaf {
    #[new]
    #[pyo3(signature = (tag, body, dtype = None))]
    fn new(
        py: Python<'_>,
        tag: Py<PyString>,
        body: Py<PyAny>,
        dtype: Option<Py<PyString>>,
    ) -> Self {
        let dtype = dtype.unwrap_or_else(|| intern!(py, "").clone().unbind());
        Self { tag, body, dtype, number: AtomicU32::new(u32::MAX) }
    }

    /// What a flat name shows of a leaf that is a dict's key.
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let tag = self.tag.bind(py).to_str()?;
        Ok(match tag {
            "$dtype" => format!("torch.{}", self.body.bind(py).str()?),
            _ => format!("<{}>", tag.strip_prefix('$').unwrap_or(tag)),
        })
    }
}

impl Leaf {
    /// The leaf of a tensor that is stored under a name.
    pub(crate) fn tensor<'py>(py: Python<'py>, name: Bound<'py, PyString>) -> PyResult<Value<'py>> {
        let tag = intern!(py, "$tensor").clone().unbind();
        Ok(Bound::new(py, Self::new(py, tag, name.into_any().unbind(), None))?.into_any())
    }

    /// The name of its tensor, if it is a tensor's leaf.
    pub(crate) fn name<'a, 'py>(&'a self, py: Python<'py>) -> Option<&'a Bound<'py, PyString>> {
        let tag = self.tag.bind(py);
        let is_tensor =
            tag.is(intern!(py, "$tensor")) || tag.to_str().is_ok_and(|tag| tag == "$tensor");
        self.body.bind(py).cast_exact().ok().filter(|_| is_tensor)
    }

    pub(crate) fn number(&self) -> usize {
        self.number.load(Relaxed) as usize
    }

    pub(crate) fn set_number(&self, number: usize) {
        self.number.store(number as u32, Relaxed);
    }
}

/// What to do with the leaves of a skeleton. Each function may return what is to be in the leaf's place.
pub(crate) trait Visit<'py> {
    /// The leaf of a tensor.
    fn tensor(
        &mut self,
        leaf: &Leaf,
        name: &Bound<'py, PyString>,
        path: &Path<'py>,
    ) -> PyResult<Option<Value<'py>>>;

    /// Any other node, with all that is in it.
    fn other(&mut self, node: &Value<'py>, path: &Path<'py>) -> PyResult<Option<Value<'py>>>;
}

/// Visits the leaves of a skeleton. Dicts and lists are changed in place. Returns what is to be in the root's place.
pub(crate) fn walk<'py>(
    node: &Value<'py>,
    visit: &mut impl Visit<'py>,
) -> PyResult<Option<Value<'py>>> {
    Walk { visit, kinds: Kinds::get(node.py())?, path: Path::default() }.node(node)
}

/// Where a node is.
#[derive(Default)]
pub(crate) struct Path<'py>(Vec<Step<'py>>);

impl<'py> Path<'py> {
    /// The path as `ringstow._state.tree._walk` has it.
    pub(crate) fn tuple(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let step = |step: &Step<'py>| match step {
            Step::Key(key) => Ok(key.clone()),
            Step::Index(at) => Ok(at.into_pyobject(py)?.into_any()),
        };
        PyTuple::new(py, self.0.iter().map(step).collect::<PyResult<Vec<_>>>()?)
    }
}

/// A step of a path.
enum Step<'py> {
    Key(Value<'py>),
    Index(usize),
}

/// Python's classes of the nodes.
struct Kinds {
    ordered: Py<PyType>,
    default: Py<PyType>,
    deque: Py<PyType>,
    boxed: Py<PyType>,
    metadata: Py<PyAny>,
}

impl Kinds {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static KINDS: PyOnceLock<Kinds> = PyOnceLock::new();
        KINDS.get_or_try_init(py, || {
            let (collections, walk) =
                (py.import("collections")?, py.import("ringstow._state.tree._walk")?);
            let class = |name| Ok::<_, PyErr>(collections.getattr(name)?.cast_into()?.unbind());
            Ok(Kinds {
                ordered: class("OrderedDict")?,
                default: class("defaultdict")?,
                deque: class("deque")?,
                boxed: walk.getattr("Box")?.cast_into()?.unbind(),
                metadata: walk.getattr("METADATA")?.unbind(),
            })
        })
    }
}

struct Walk<'a, 'py, V> {
    visit: &'a mut V,
    kinds: &'static Kinds,
    path: Path<'py>,
}

impl<'py, V: Visit<'py>> Walk<'_, 'py, V> {
    fn node(&mut self, node: &Value<'py>) -> PyResult<Option<Value<'py>>> {
        if let Ok(leaf) = node.cast_exact::<Leaf>() {
            return match leaf.get().name(node.py()) {
                Some(name) => self.visit.tensor(leaf.get(), name, &self.path),
                None => self.other(node),
            };
        }
        if node.is_exact_instance_of::<PyString>() || node.is_exact_instance_of::<PyInt>() {
            return Ok(None);
        }
        if let Ok(dict) = node.cast_exact::<PyDict>() {
            return self.dict(dict);
        }
        if let Ok(list) = node.cast_exact::<PyList>() {
            return self.list(list).map(|()| None);
        }
        if let Ok(tuple) = node.cast_exact::<PyTuple>() {
            return self.tuple(tuple);
        }
        let (kind, kinds, py) = (node.get_type(), self.kinds, node.py());
        if kind.is(kinds.ordered.bind(py)) || kind.is(kinds.default.bind(py)) {
            return self.dict(node.cast()?);
        }
        match kind.is(kinds.deque.bind(py)) || kind.is(kinds.boxed.bind(py)) {
            true => self.other(node),
            false => Ok(None),
        }
    }

    fn dict(&mut self, dict: &Bound<'py, PyDict>) -> PyResult<Option<Value<'py>>> {
        if !dict.iter().all(|(key, _)| is_plain(&key)) {
            return self.other(dict);
        }
        let is_plain = dict.is_exact_instance_of::<PyDict>();
        // Only the values of keys that it has change: the iteration allows that.
        for (key, child) in dict.iter() {
            self.path.0.push(Step::Key(key.clone()));
            if let Some(made) = self.node(&child)? {
                match is_plain {
                    true => dict.set_item(key, made)?,
                    false => dict.as_any().set_item(key, made)?,
                }
            }
            self.path.0.pop();
        }
        if !is_plain && dict.get_type().is(self.kinds.ordered.bind(dict.py())) {
            self.metadata(dict)?;
        }
        Ok(None)
    }

    /// The metadata that an OrderedDict may carry.
    fn metadata(&mut self, dict: &Bound<'py, PyDict>) -> PyResult<()> {
        let name = intern!(dict.py(), "_metadata");
        let Some(metadata) = dict.as_any().getattr_opt(name)?.filter(|found| !found.is_none())
        else {
            return Ok(());
        };
        self.path.0.push(Step::Key(self.kinds.metadata.bind(dict.py()).clone()));
        if let Some(made) = self.node(&metadata)? {
            dict.setattr(name, made)?;
        }
        self.path.0.pop();
        Ok(())
    }

    fn list(&mut self, list: &Bound<'py, PyList>) -> PyResult<()> {
        for (at, child) in list.iter().enumerate() {
            self.path.0.push(Step::Index(at));
            if let Some(made) = self.node(&child)? {
                list.set_item(at, made)?;
            }
            self.path.0.pop();
        }
        Ok(())
    }

    fn tuple(&mut self, tuple: &Bound<'py, PyTuple>) -> PyResult<Option<Value<'py>>> {
        let mut items: Vec<Value<'py>> = tuple.iter().collect();
        let mut has_changed = false;
        for (at, item) in items.iter_mut().enumerate() {
            self.path.0.push(Step::Index(at));
            if let Some(made) = self.node(item)? {
                (*item, has_changed) = (made, true);
            }
            self.path.0.pop();
        }
        if !has_changed {
            return Ok(None);
        }
        Ok(Some(PyTuple::new(tuple.py(), items)?.into_any()))
    }

    #[inline(never)]
    fn other(&mut self, node: &Value<'py>) -> PyResult<Option<Value<'py>>> {
        self.visit.other(node, &self.path)
    }
}

/// Whether a dict's key is what it will be, and holds nothing.
fn is_plain(key: &Value<'_>) -> bool {
    key.is_exact_instance_of::<PyString>()
        || key.is_exact_instance_of::<PyInt>()
        || key.is_exact_instance_of::<PyFloat>()
        || key.is_exact_instance_of::<PyBool>()
        || key.is_none()
}
