//! Files as streams: bytes of any buffer, copied without the GIL.

use crate::error::to_python;
use crate::exit::refuse_late;
use crate::logging;
use crate::owned::Owned;
use crate::to_json;
use crate::wait::without_gil;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringstow::{Error, Result, Store, WriteOptions};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Bytes that are moved before Ctrl-C is looked for.
const SLICE: usize = 64 << 20;

/// Refuses a second call while one is in progress, of another thread or of a signal handler.
#[derive(Default)]
struct Turn(AtomicBool);

/// Ends a call when it is dropped.
struct Taken<'a>(&'a AtomicBool);

impl Turn {
    fn take(&self) -> PyResult<Taken<'_>> {
        match self.0.swap(true, SeqCst) {
            true => Err(PyRuntimeError::new_err(
                "another thread is using the stream: use it in one thread at a time",
            )),
            false => Ok(Taken(&self.0)),
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

fn closed() -> Error {
    Error::invalid("the stream is closed, or was opened before this process was forked")
}

/// A file that is written, until it is published or aborted.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct FileWriter {
    file: Owned<ringstow::FileWriter>,
    turn: Turn,
}

impl FileWriter {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut ringstow::FileWriter) -> Result<T> + Send,
    ) -> PyResult<T> {
        let done = without_gil(py, || act(self.file.lock().as_mut().ok_or_else(closed)?));
        done.map_err(to_python)
    }
}

#[pymethods]
impl FileWriter {
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        config: &str,
        overwrite: bool,
        checksums: bool,
    ) -> PyResult<Self> {
        refuse_late("write a file")?;
        let config = crate::config(config)?;
        let options = WriteOptions { overwrite, checksums };
        let open = || Store::new(config)?.open_write(path, options);
        let file = without_gil(py, open).map_err(to_python);
        logging::deliver(py)?;
        Ok(Self { file: Owned::new(file?), turn: Turn::default() })
    }

    /// Writes all of a buffer's bytes. After an error, Ctrl-C's too, nothing can be published.
    fn write(&self, py: Python<'_>, bytes: PyBuffer<u8>) -> PyResult<usize> {
        let _turn = self.turn.take()?;
        if !bytes.is_c_contiguous() {
            return Err(PyBufferError::new_err("the buffer is not contiguous"));
        }
        let (address, len) = (bytes.buf_ptr() as usize, bytes.len_bytes());
        if len == 0 {
            return Ok(0);
        }
        // SAFETY: `bytes` holds the memory, and its owner must not change it meanwhile, as for any write.
        let all = unsafe { std::slice::from_raw_parts(address as *const u8, len) };
        for slice in all.chunks(SLICE) {
            self.with(py, |file| file.write_bytes(slice))?;
            if len > SLICE
                && let Err(interrupt) = py.check_signals()
            {
                self.with(py, |file| {
                    file.abort();
                    Ok(())
                })?;
                return Err(interrupt);
            }
        }
        Ok(len)
    }

    fn tell(&self) -> PyResult<u64> {
        let _turn = self.turn.take()?;
        let position = self.file.lock().as_ref().map(ringstow::FileWriter::position);
        position.ok_or_else(|| to_python(closed()))
    }

    /// Publishes the file; its report.
    fn finish(&self, py: Python<'_>) -> PyResult<String> {
        let _turn = self.turn.take()?;
        let file = self.file.take().ok_or_else(|| to_python(closed()))?;
        let done = without_gil(py, || file.finish()).map_err(to_python);
        logging::deliver(py)?;
        to_json(&done?)
    }

    /// Publishes nothing, and removes what was written.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let _turn = self.turn.take()?;
        let file = self.file.take();
        without_gil(py, || drop(file));
        Ok(())
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        let file = self.file.take();
        Python::attach(|py| without_gil(py, || drop(file)));
    }
}

/// A file that is read, until it is closed.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct FileReader {
    file: Owned<ringstow::FileReader>,
    turn: Turn,
    #[pyo3(get)]
    size: u64,
    #[pyo3(get)]
    unchecked: Option<String>,
}

impl FileReader {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut ringstow::FileReader) -> Result<T> + Send,
    ) -> PyResult<T> {
        let done = without_gil(py, || act(self.file.lock().as_mut().ok_or_else(closed)?));
        done.map_err(to_python)
    }

    /// Fills `to` as far as the file goes.
    fn fill(&self, py: Python<'_>, to: &mut [u8]) -> PyResult<usize> {
        let mut done = 0;
        for slice in to.chunks_mut(SLICE) {
            let wanted = slice.len();
            let read = self.with(py, |file| file.read_bytes(slice))?;
            done += read;
            if read < wanted {
                break;
            }
            py.check_signals()?;
        }
        Ok(done)
    }
}

#[pymethods]
impl FileReader {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, config: &str) -> PyResult<Self> {
        refuse_late("read a file")?;
        let config = crate::config(config)?;
        let file = without_gil(py, || Store::new(config)?.open_read(path)).map_err(to_python);
        logging::deliver(py)?;
        let file = file?;
        let (size, unchecked) = (file.size(), file.unchecked().map(str::to_owned));
        Ok(Self { file: Owned::new(file), turn: Turn::default(), size, unchecked })
    }

    fn readinto(&self, py: Python<'_>, to: PyBuffer<u8>) -> PyResult<usize> {
        let _turn = self.turn.take()?;
        if !to.is_c_contiguous() || to.readonly() {
            return Err(PyBufferError::new_err("the buffer is read-only or not contiguous"));
        }
        let (address, len) = (to.buf_ptr() as usize, to.len_bytes());
        if len == 0 {
            return Ok(0);
        }
        // SAFETY: `to` holds the memory, which is writable; its owner must not use it meanwhile, as for any readinto.
        let all = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len) };
        self.fill(py, all)
    }

    /// The next `len` bytes, which the file has.
    fn read<'py>(&self, py: Python<'py>, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        let _turn = self.turn.take()?;
        PyBytes::new_with(py, len, |to| match self.fill(py, to)? == to.len() {
            true => Ok(()),
            false => Err(to_python(Error::invalid("the file has fewer bytes than that"))),
        })
    }

    /// The bytes that were read ahead, `len` at most.
    fn peek<'py>(&self, py: Python<'py>, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        let _turn = self.turn.take()?;
        let copy = |file: &mut ringstow::FileReader| {
            let bytes = file.peek()?;
            Ok(bytes[..bytes.len().min(len)].to_vec())
        };
        Ok(PyBytes::new(py, &self.with(py, copy)?))
    }

    fn seek(&self, py: Python<'_>, position: u64) -> PyResult<()> {
        let _turn = self.turn.take()?;
        self.with(py, |file| {
            file.set_position(position);
            Ok(())
        })
    }

    fn tell(&self, py: Python<'_>) -> PyResult<u64> {
        let _turn = self.turn.take()?;
        self.with(py, |file| Ok(file.position()))
    }

    /// The engine, and whether it uses O_DIRECT.
    fn moved(&self, py: Python<'_>) -> PyResult<(String, bool)> {
        let _turn = self.turn.take()?;
        self.with(py, |file| file.moved().map(|moved| (moved.engine.clone(), moved.direct)))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let _turn = self.turn.take()?;
        let file = self.file.take();
        without_gil(py, || drop(file));
        Ok(())
    }
}

impl Drop for FileReader {
    fn drop(&mut self) {
        let file = self.file.take();
        Python::attach(|py| without_gil(py, || drop(file)));
    }
}
