//! What outlives a single save: the staging pool and the engines' threads.

use crate::config::Config;
#[cfg(all(target_os = "linux", any(feature = "uring", feature = "tokio-uring")))]
use crate::config::Switch;
use crate::engine::Engine;
use crate::engine::inherited;
use crate::engine::ladder::{Kind, Rung};
use crate::engine::portable::Portable;
use crate::engine::queue::Queue;
use crate::error::Result;
use crate::pool::Pool;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// Name of the engines' threads.
const THREAD: &str = "ringstow-io";

/// The staging pool and the engines, each made when first needed and kept for the next save.
///
/// Saves and loads that run at the same time share it: they draw buffers from one pool, and their
/// transfers take turns in one queue.
pub struct Runtime {
    config: Config,
    /// Builds every engine, in place of ringstow's own.
    build: Option<Build>,
    pool: Mutex<Option<Pool>>,
    /// Whether with fixed buffers, and the queue.
    queues: Mutex<Vec<(Kind, bool, Arc<Queue>)>>,
}

/// Builds an engine, in the thread that will drive it.
pub type Build = Arc<dyn Fn() -> io::Result<Box<dyn Engine>> + Send + Sync>;

impl Runtime {
    /// Checks the configuration; takes nothing from the system yet.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for numbers that do not fit.
    pub fn new(config: Config) -> Result<Self> {
        config.validate()?;
        Ok(Self { config, build: None, pool: Mutex::new(None), queues: Mutex::new(Vec::new()) })
    }

    /// A runtime over an engine of the caller's: one of its own making, or a
    /// [`Faulty`](crate::engine::faulty::Faulty) one in tests. It serves every rung of the ladder.
    ///
    /// # Errors
    /// As for [`Runtime::new`].
    pub fn with_engine(config: Config, build: Build) -> Result<Self> {
        Ok(Self { build: Some(build), ..Self::new(config)? })
    }

    /// The process's runtime for this configuration, whatever it says of traces. The two used last are kept, so that the next
    /// save finds its memory prefaulted and registered, also if loads are configured otherwise.
    ///
    /// # Errors
    /// As for [`Runtime::new`].
    pub fn shared(config: &Config) -> Result<Arc<Self>> {
        let config = Config { trace: None, ..config.clone() };
        let mut kept = kept();
        let known = kept.iter().position(|runtime| runtime.config == config);
        let runtime = match known {
            Some(index) => kept.remove(index),
            None => Arc::new(Self::new(config)?),
        };
        kept.insert(0, runtime.clone());
        kept.truncate(KEPT_MAX);
        Ok(runtime)
    }

    /// Gives the shared runtimes' memory and threads back once nothing uses them.
    pub fn release_shared() {
        kept().clear();
    }

    /// To be called in a forked child, before anything else here: the threads are the parent's, the pools are
    /// not mapped here, and the files and locks of its saves and loads are closed, which otherwise stay open as long
    /// as the child lives. Handles and sessions that it inherited are to be forgotten, never dropped.
    pub fn forget_after_fork() {
        inherited::close();
        std::mem::forget(std::mem::take(&mut *kept()));
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the staging pool has been made.
    pub(super) fn has_pool(&self) -> bool {
        self.pool.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).is_some()
    }

    /// The staging pool.
    ///
    /// # Errors
    /// The system's, when there is no memory for it.
    pub fn pool(&self) -> io::Result<Pool> {
        let mut pool = self.pool.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if pool.is_none() {
            *pool = Some(Pool::new(self.config.buffers(), self.config.block_bytes as usize)?);
        }
        Ok(pool.clone().expect("just made"))
    }

    /// The running queue that this rung needs; a new one if there is none or its engine broke.
    ///
    /// # Errors
    /// The system's, when the engine cannot be had here.
    pub(crate) fn queue(&self, rung: &Rung) -> io::Result<Arc<Queue>> {
        let mut queues = self.queues.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        queues.retain(|(.., queue)| queue.is_alive());
        let fits =
            |(kind, fixed, _): &&(Kind, bool, _)| (*kind, *fixed) == (rung.engine, rung.fixed);
        if let Some((.., queue)) = queues.iter().find(fits) {
            return Ok(queue.clone());
        }
        let queue = Arc::new(self.start(rung)?);
        queues.push((rung.engine, rung.fixed, queue.clone()));
        Ok(queue)
    }

    fn start(&self, rung: &Rung) -> io::Result<Queue> {
        let depth = self.config.queue_depth as usize;
        if let Some(build) = self.build.clone() {
            return Queue::start(THREAD, move || build());
        }
        match rung.engine {
            Kind::Portable => {
                Queue::start(THREAD, move || Ok(Box::new(Portable::new(depth)?) as Box<dyn Engine>))
            }
            Kind::Uring => self.start_uring(depth, rung.fixed),
            Kind::TokioUring => self.start_tokio_uring(depth, rung.fixed),
        }
    }

    #[cfg(all(target_os = "linux", feature = "uring"))]
    fn start_uring(&self, depth: usize, fixed: bool) -> io::Result<Queue> {
        use crate::engine::uring::Uring;
        let (pool, switch) = self.to_register(fixed)?;
        Queue::start(THREAD, move || {
            Ok(Box::new(Uring::new(depth, pool.as_ref(), switch)?) as Box<dyn Engine>)
        })
    }

    #[cfg(not(all(target_os = "linux", feature = "uring")))]
    fn start_uring(&self, _depth: usize, _fixed: bool) -> io::Result<Queue> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this build has no io_uring engine (Linux with the cargo feature `uring` has)",
        ))
    }

    #[cfg(all(target_os = "linux", feature = "tokio-uring"))]
    fn start_tokio_uring(&self, depth: usize, fixed: bool) -> io::Result<Queue> {
        use crate::engine::tokio_uring::TokioUring;
        let (pool, switch) = self.to_register(fixed)?;
        Queue::start(THREAD, move || {
            Ok(Box::new(TokioUring::new(depth, pool.as_ref(), switch)?) as Box<dyn Engine>)
        })
    }

    #[cfg(not(all(target_os = "linux", feature = "tokio-uring")))]
    fn start_tokio_uring(&self, _depth: usize, _fixed: bool) -> io::Result<Queue> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this build has no tokio-uring engine (Linux with the cargo feature `tokio-uring` has)",
        ))
    }

    /// The pool for an engine to register, and how much it is insisted on.
    #[cfg(all(target_os = "linux", any(feature = "uring", feature = "tokio-uring")))]
    fn to_register(&self, fixed: bool) -> io::Result<(Option<Pool>, Switch)> {
        Ok(match fixed {
            true => (Some(self.pool()?), self.config.fixed),
            false => (None, Switch::Off),
        })
    }
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Runtimes that are kept for the next save or load.
const KEPT_MAX: usize = 2;

/// The one used last comes first.
static KEPT: Mutex<Vec<Arc<Runtime>>> = Mutex::new(Vec::new());

fn kept() -> MutexGuard<'static, Vec<Arc<Runtime>>> {
    KEPT.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
