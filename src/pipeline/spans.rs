//! Reads spans of tensors where they are, by as many threads as fill the blocks of a save. Writes nothing.

use super::job::Job;
use super::runtime::Runtime;
use super::workers::scoped_workers;
use crate::device::TensorSource;
#[cfg(feature = "cuda")]
use crate::device::{StagedCopy, pin_for_sources};
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::pool::Pool;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Consecutive spans that one thread reads at a time: it would cost more to count them one by one.
const SPANS_AT_ONCE: usize = 16;

/// Bytes of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    /// Index among the sources.
    pub item: usize,
    /// Which of its dense bytes; no more than a staging buffer holds.
    pub range: Range<usize>,
}

/// Calls `each` with the number and the bytes of each span, in no order, and from several threads. Spans of which
/// `is_wanted` is false when their turn comes are left out. `dir` is for messages.
///
/// # Errors
/// A source's or a GPU's; [`Error::Cancelled`].
pub(crate) fn read_each(
    runtime: &Runtime,
    sources: &[TensorSource<'_>],
    spans: &[Span],
    (dir, job): (&Path, &Arc<Job>),
    (is_wanted, each): (impl Fn(usize) -> bool + Sync, impl Fn(usize, &[u8]) + Sync),
) -> Result<()> {
    let reader = Reader::new(runtime, sources, spans, dir)?;
    let (next, failed) = (AtomicUsize::new(0), OnceLock::new());
    let work = || {
        let mut scratch = Vec::new();
        while !job.stopped() && failed.get().is_none() {
            let first = next.fetch_add(SPANS_AT_ONCE, Relaxed);
            let Some(rest) = spans.get(first..).filter(|rest| !rest.is_empty()) else { return };
            let wanted = (first..).zip(rest).take(SPANS_AT_ONCE).filter(|(n, _)| is_wanted(*n));
            for (number, span) in wanted {
                if let Err(error) = reader.read(span, &mut scratch, |bytes| each(number, bytes)) {
                    let _ = failed.set(error); // another may have come first
                    return;
                }
            }
        }
    };
    let config = runtime.config();
    scoped_workers((config.filler_threads(), config.priority()), work, || job.cancel());
    match failed.into_inner() {
        Some(error) => Err(error),
        None if job.stopped() => Err(Error::Cancelled { path: dir.into() }),
        None => Ok(()),
    }
}

/// Reads spans, those on GPUs by way of the staging memory.
struct Reader<'a> {
    sources: &'a [TensorSource<'a>],
    /// There if a span is on a GPU.
    #[cfg(feature = "cuda")]
    pool: Option<Pool>,
    #[cfg(feature = "cuda")]
    dir: &'a Path,
}

impl<'a> Reader<'a> {
    #[cfg(feature = "cuda")]
    fn new(
        runtime: &Runtime,
        sources: &'a [TensorSource<'a>],
        spans: &[Span],
        dir: &'a Path,
    ) -> Result<Self> {
        if !spans.iter().any(|span| sources[span.item].is_on_gpu()) {
            return Ok(Self { sources, pool: None, dir });
        }
        let pool = runtime.pool().map_err(|e| Error::io("taking staging memory for", dir, e))?;
        pin_for_sources(&pool, sources); // the save, which does so again, reports why it is not
        Ok(Self { sources, pool: Some(pool), dir })
    }

    #[cfg(not(feature = "cuda"))]
    fn new(_: &Runtime, sources: &'a [TensorSource<'a>], _: &[Span], _: &'a Path) -> Result<Self> {
        Ok(Self { sources })
    }

    /// Calls `each` with the bytes of a span: where they are, or copied.
    fn read(&self, span: &Span, scratch: &mut Vec<u8>, each: impl FnOnce(&[u8])) -> Result<()> {
        let range = &span.range;
        match &self.sources[span.item] {
            TensorSource::Host(source) => {
                if let Some(bytes) = source.lend(range.clone()) {
                    each(bytes);
                    return Ok(());
                }
                scratch.resize(range.len(), 0);
                source.read(range.start, scratch)?;
                each(scratch);
            }
            #[cfg(feature = "cuda")]
            source @ TensorSource::Cuda(_) => {
                let pool = self.pool.as_ref().expect("a span on a GPU has made a pool");
                let buffer = pool
                    .lease()
                    .map_err(|e| Error::io("taking staging memory for", self.dir, e))?;
                let mut staged = StagedCopy::new(buffer);
                staged.gather(source, range.start, 0..range.len())?;
                staged.start()?;
                each(&staged.finish()?.buffer[..range.len()]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::device::Source;
    use std::sync::Mutex;

    /// A source that lends nothing.
    struct Copied(Vec<u8>);

    impl Source for Copied {
        fn nbytes(&self) -> u64 {
            self.0.nbytes()
        }
        fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
            match offset {
                666 => Err(Error::invalid("the memory is gone")),
                _ => self.0.read(offset, to),
            }
        }
    }

    fn spans(ranges: &[(usize, Range<usize>)]) -> Vec<Span> {
        ranges.iter().map(|(item, range)| Span { item: *item, range: range.clone() }).collect()
    }

    fn read(sources: &[TensorSource], spans: &[Span], wanted: &[bool]) -> Result<Vec<Vec<u8>>> {
        let runtime = Runtime::new(Config { fillers: 3, ..Config::default() }).unwrap();
        let found = Mutex::new(vec![Vec::new(); spans.len()]);
        let each = |number: usize, bytes: &[u8]| found.lock().unwrap()[number] = bytes.to_vec();
        let at = (Path::new("dir"), &Arc::default());
        read_each(&runtime, sources, spans, at, (|number| wanted[number], each))?;
        Ok(found.into_inner().unwrap())
    }

    #[test]
    fn wanted_spans_are_read_where_they_are_or_copied() {
        let bytes: Vec<u8> = (0..1000).map(|n| (n % 251) as u8).collect();
        let sources =
            [Box::new(bytes.clone()).into(), TensorSource::from(Box::new(Copied(bytes.clone())))];
        let all = spans(&[(0, 5..700), (1, 7..9), (0, 0..1)]);
        let read = read(&sources, &all, &[true, true, false]).unwrap();
        let expected = [&bytes[5..700], &bytes[7..9], &[]];
        assert_eq!(read, expected);
    }

    #[test]
    fn failure_of_a_source_ends_the_reading() {
        let sources = [TensorSource::from(Box::new(Copied(vec![0; 1000])))];
        let error = read(&sources, &spans(&[(0, 0..3), (0, 666..669)]), &[true; 2]).unwrap_err();
        assert!(error.to_string().contains("the memory is gone"), "{error}");
    }
}
