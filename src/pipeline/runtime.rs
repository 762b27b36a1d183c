//! What outlives a single save: the staging pool and the engines' threads.

use crate::config::{Config, MachineConfig, Switch};
use crate::engine::Engine;
use crate::engine::io_mode::{EngineKind, IoMode};
use crate::engine::portable::Portable;
use crate::engine::queue::Queue;
use crate::error::Result;
use crate::pool::{Pool, give_back_copies, has_copies};
use crate::sys::fork;
use crate::sys::fork::{GENERATIONS, PerProcess};
use crate::sys::inherited;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// Name of the engines' threads.
const THREAD: &str = "ringstow-io";

/// A configuration, and the staging pool and engines to save and load with. They are created when first needed, and
/// kept for the next save.
///
/// Concurrent saves and loads take buffers from one pool, and their transfers take turns in one queue. Runtimes whose
/// configurations need the same pool and engines share them; see [`Runtime::shared`].
pub struct Runtime {
    config: Config,
    /// `Some` until `drop`.
    machine: Option<Arc<Machine>>,
    /// Whether others may have the same machine.
    is_shared: bool,
}

/// Builds an engine, in the thread that will drive it.
pub type Build = Arc<dyn Fn() -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// The pool and the engines.
struct Machine {
    made_for: MachineConfig,
    /// Builds every engine instead of ringstow's own.
    build: Option<Build>,
    pool: Mutex<Option<Pool>>,
    queues: Mutex<Vec<Running>>,
}

/// A queue, with its engine and pool.
struct Running {
    engine: EngineKind,
    /// Address of the pool that it registers.
    pool: Option<usize>,
    queue: Arc<Queue>,
}

impl Runtime {
    /// Checks the configuration; takes nothing from the system yet.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for an invalid configuration.
    pub fn new(config: Config) -> Result<Self> {
        Self::over(config, None)
    }

    /// Creates a runtime over the caller's engine, which serves every I/O mode.
    ///
    /// # Errors
    /// As for [`Runtime::new`].
    pub fn with_engine(config: Config, build: Build) -> Result<Self> {
        Self::over(config, Some(build))
    }

    fn over(config: Config, build: Option<Build>) -> Result<Self> {
        config.validate()?;
        let machine = Some(Arc::new(Machine::new(config.machine(), build)));
        Ok(Self { config, machine, is_shared: false })
    }

    /// A runtime over the pool and engines that the process shares among configurations with the same size and number
    /// of buffers, queue depth, `fixed` and priorities. The two sets used last are kept, so that a save finds its memory again
    /// even if loads use another configuration.
    ///
    /// # Errors
    /// As for [`Runtime::new`].
    pub fn shared(config: &Config) -> Result<Arc<Self>> {
        config.validate()?;
        let machine_config = config.machine();
        let (machine, let_go) = match KEPT.lock() {
            None => (Arc::new(Machine::new(machine_config, None)), Vec::new()),
            Some(mut kept) => {
                let known = kept.iter().position(|machine| machine.made_for == machine_config);
                let machine = known.map(|index| kept.remove(index));
                let machine =
                    machine.unwrap_or_else(|| Arc::new(Machine::new(machine_config, None)));
                kept.insert(0, machine.clone());
                let remaining = kept.len().min(KEPT_MAX);
                (machine, kept.split_off(remaining))
            }
        };
        let_go.into_iter().for_each(let_go_elsewhere);
        Ok(Arc::new(Self { config: config.clone(), machine: Some(machine), is_shared: true }))
    }

    /// Frees the shared runtimes' memory and threads once nothing uses them.
    pub fn release_shared() {
        let kept = KEPT.lock().map(|mut kept| std::mem::take(&mut *kept));
        drop(kept); // not under the lock: this joins threads
    }

    /// Gives the system all staging memory that shared runtimes have taken and no save or load uses now, and stops the engines
    /// that nothing uses. Returns how many bytes.
    pub fn release_memory() -> u64 {
        let pools = kept().iter().map(|machine| machine.release()).sum::<usize>();
        (pools + give_back_copies(Duration::ZERO)) as u64
    }

    /// Call this first in a forked child, which has neither the parent's threads nor its pools. Closes the files and
    /// locks of the parent's saves and loads, which would otherwise stay open as long as the child lives. Takes no
    /// lock that a thread of the parent may have held. The child must forget inherited handles and sessions, never
    /// drop them: a drop waits for a thread that the child does not have.
    pub fn forget_after_fork() {
        inherited::close();
        fork::forked();
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The staging pool.
    ///
    /// # Errors
    /// The system's, if there is no address space left.
    pub fn pool(&self) -> io::Result<Pool> {
        self.machine().pool()
    }

    /// Sees to it that memory which background saves and copies have taken is given back when it is idle, or others need it.
    pub fn watch_memory() {
        if !has_further_memory() {
            return;
        }
        let Some(mut is_watched) = IS_WATCHED.lock() else { return };
        if !*is_watched {
            let watch = thread::Builder::new().name("ringstow-memory".into()).spawn(watch_memory);
            *is_watched = watch.is_ok(); // if no thread can be started, the next save tries again
        }
    }

    /// The running queue for this mode; a new one if there is none or its engine broke.
    ///
    /// # Errors
    /// The system's, if the engine cannot be started.
    pub(crate) fn queue(&self, mode: &IoMode) -> io::Result<Arc<Queue>> {
        self.machine().queue(mode)
    }

    /// Whether the engine is the caller's, through which it expects every transfer.
    pub(crate) fn has_given_engine(&self) -> bool {
        self.machine().build.is_some()
    }

    fn machine(&self) -> &Machine {
        self.machine.as_ref().expect("only `drop` takes it")
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Some(machine) = self.machine.take().filter(|_| self.is_shared) {
            let_go_elsewhere(machine);
        }
    }
}

/// Drops a shared machine on a thread of its own: joining its threads and unmapping its memory can take a second. The
/// caller may also hold a lock that those threads wait for, such as the interpreter's.
fn let_go_elsewhere(machine: Arc<Machine>) {
    let Some(machine) = Arc::into_inner(machine).filter(Machine::has_anything) else { return };
    // If no thread can be started, this drops it here.
    drop(thread::Builder::new().name("ringstow-let-go".into()).spawn(move || drop(machine)));
}

impl Machine {
    fn new(made_for: MachineConfig, build: Option<Build>) -> Self {
        Self { made_for, build, pool: Mutex::new(None), queues: Mutex::new(Vec::new()) }
    }

    fn has_anything(&self) -> bool {
        !self.queues.lock().is_ok_and(|queues| queues.is_empty())
            || !self.pool.lock().is_ok_and(|pool| pool.is_none())
    }

    fn made_pool(&self) -> MutexGuard<'_, Option<Pool>> {
        self.pool.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether the pool has memory beyond its own buffers.
    fn has_grown(&self) -> bool {
        self.made_pool().as_ref().is_some_and(|pool| pool.further_bytes() > 0)
    }

    fn pool(&self) -> io::Result<Pool> {
        let mut pool = self.made_pool();
        if let Some(pool) = pool.as_ref().filter(|pool| !pool.is_broken()) {
            return Ok(pool.clone());
        }
        let made = Pool::new(self.made_for.buffers, self.made_for.block_bytes as usize)?;
        Ok(pool.insert(made).clone())
    }

    /// Gives up the engines and the pool if nothing uses them; otherwise what the pool has taken for a while. Returns how many
    /// bytes of memory that were.
    fn release(&self) -> usize {
        let is_idle = |running: &mut Running| Arc::strong_count(&running.queue) == 1;
        let mut queues = self.queues.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let idle: Vec<_> = queues.extract_if(.., is_idle).collect();
        drop(queues);
        drop(idle); // first: they have the pool. Not under the lock: this joins threads
        let pool = self.made_pool().take_if(|pool| pool.is_alone());
        match pool {
            Some(pool) => pool.taken_bytes(),
            None => self.give_back(Duration::ZERO),
        }
    }

    /// Gives memory back that the pool has taken for a while; see [`Pool::give_back`].
    fn give_back(&self, idle: Duration) -> usize {
        let pool = self.made_pool().clone();
        pool.map_or(0, |pool| pool.give_back(idle)) // without the lock: it takes a while
    }

    fn queue(&self, mode: &IoMode) -> io::Result<Arc<Queue>> {
        let pool = if mode.fixed { Some(self.pool()?) } else { None };
        let (engine, at) = (mode.engine, pool.as_ref().map(|pool| pool.base() as usize));
        let mut queues = self.queues.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        queues.retain(|running| running.queue.is_alive());
        let fits = |running: &&Running| (running.engine, running.pool) == (engine, at);
        if let Some(running) = queues.iter().find(fits) {
            return Ok(running.queue.clone());
        }
        let queue = Arc::new(self.start(engine, pool)?);
        queues.push(Running { engine, pool: at, queue: queue.clone() });
        Ok(queue)
    }

    fn start(&self, engine: EngineKind, pool: Option<Pool>) -> io::Result<Queue> {
        let (depth, build) = (self.made_for.queue_depth as usize, self.build.clone());
        // Whether registering the pool is required, optional or off.
        let fixed = if pool.is_some() { self.made_for.fixed } else { Switch::Off };
        let priority = self.made_for.priority;
        Queue::start(THREAD, move || {
            priority.try_apply(); // before the engine starts threads, which inherit it
            match build {
                Some(build) => build(),
                None => build_engine(engine, depth, pool.as_ref(), fixed),
            }
        })
    }
}

fn build_engine(
    kind: EngineKind,
    depth: usize,
    pool: Option<&Pool>,
    fixed: Switch,
) -> io::Result<Box<dyn Engine>> {
    Ok(match kind {
        EngineKind::Portable => Box::new(Portable::new(depth)?),
        #[cfg(all(target_os = "linux", feature = "uring"))]
        EngineKind::Uring => Box::new(crate::engine::uring::Uring::new(depth, pool, fixed)?),
        #[cfg(all(target_os = "linux", feature = "tokio-uring"))]
        EngineKind::TokioUring => {
            Box::new(crate::engine::tokio_uring::TokioUring::new(depth, pool, fixed)?)
        }
        #[allow(unreachable_patterns)] // in a build with all of them
        missing => {
            let (_, _, name) = (pool, fixed, missing.name());
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "this build has no {name} engine (Linux with the cargo feature `{name}` has)"
                ),
            ));
        }
    })
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Machines that are kept for the next save or load.
const KEPT_MAX: usize = 2;

/// The machines used last, most recent first.
static KEPT: PerProcess<Vec<Arc<Machine>>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);

/// How long memory that no background save uses is kept for the next: new memory is slow.
const IDLE: Duration = Duration::from_secs(3600);

/// How often to look whether others need it.
const LOOK: Duration = Duration::from_secs(10);

/// Whether a thread looks.
static IS_WATCHED: PerProcess<bool> = PerProcess::new([const { Mutex::new(false) }; GENERATIONS]);

/// Looks until no memory is left to give back.
fn watch_memory() {
    loop {
        thread::sleep(LOOK);
        give_back(IDLE);
        let Some(mut is_watched) = IS_WATCHED.lock() else { return };
        *is_watched = has_further_memory();
        if !*is_watched {
            return;
        }
    }
}

/// Gives memory back that no save uses: all that was not used during `idle`, or what others have come to need.
fn give_back(idle: Duration) {
    give_back_copies(idle);
    for machine in kept() {
        machine.give_back(idle);
    }
}

/// Whether the process has memory that others may come to need.
fn has_further_memory() -> bool {
    has_copies() || kept().iter().any(|machine| machine.has_grown())
}

fn kept() -> Vec<Arc<Machine>> {
    KEPT.lock().map_or_else(Vec::new, |kept| kept.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineChoice;
    use crate::engine::queue::{Reply, Request};
    use crate::engine::{Action, FileId};
    use crossbeam_channel::bounded;
    use std::path::PathBuf;
    use std::process::Command;
    use std::time::Duration;

    /// How long a call that must not wait may take.
    const LIMIT: Duration = Duration::from_secs(60);

    /// What a function returns that must not wait for this thread.
    fn returned<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = bounded(1);
        thread::spawn(move || tell.send(act()));
        told.recv_timeout(LIMIT).expect("it waits for this thread")
    }

    fn config(blocks: u64) -> Config {
        Config { pool_bytes: blocks * 4096, block_bytes: 4096, ..Config::default() }
    }

    fn same(a: &Config, b: &Config) -> bool {
        let (a, b) = (Runtime::shared(a).unwrap(), Runtime::shared(b).unwrap());
        std::ptr::eq(a.machine(), b.machine())
    }

    #[test]
    fn configs_with_equal_machine_share_pool_and_engines() {
        let base = config(1009);
        let stripe = vec![PathBuf::from("/mnt/b")];
        for other in [
            Config { recycle: true, ..base.clone() },
            Config { stripe, ..base.clone() },
            Config { trace: Some("trace.json".into()), files: 4, shard_bytes: 1, ..base.clone() },
            Config { engine: EngineChoice::Portable, fillers: 3, ..base.clone() },
            Config { direct: Switch::Off, ..base.clone() },
        ] {
            assert!(same(&base, &other), "{other:?}");
            assert_eq!(Runtime::shared(&other).unwrap().config(), &other);
        }
        for other in [
            config(1013),
            Config { queue_depth: 9, ..base.clone() },
            Config { fixed: Switch::Off, ..base.clone() },
        ] {
            assert!(!same(&base, &other), "{other:?}");
        }
    }

    #[test]
    fn evicting_a_runtime_does_not_join_its_threads() {
        let machine = Arc::new(Machine::new(config(1019).machine(), None));
        let mode = IoMode { engine: EngineKind::Portable, fixed: false, direct: false };
        let queue = machine.queue(&mode).unwrap();
        KEPT.lock().unwrap().insert(0, machine);
        // Keeps the I/O thread in a reply.
        let ((tell, go), (gone, ended)) = (bounded::<()>(1), bounded(1));
        let reply = Reply::new(move |_| {
            go.recv().unwrap();
            gone.send(()).unwrap();
        });
        let (file, action) = (FileId(0), Action::Sync);
        queue.submit(Request { file, action, needed: 0, is_bulk: false, abort: None, reply });
        drop(queue);
        returned(|| {
            for blocks in [1021, 1031, 1033] {
                drop(Runtime::shared(&config(blocks)).unwrap());
            }
        });
        tell.send(()).unwrap();
        ended.recv_timeout(LIMIT).expect("the thread goes on");
    }

    #[test]
    fn pool_that_nothing_uses_is_released_with_its_engine_and_one_in_use_is_not() {
        const BLOCK: usize = 64 << 10;
        let config = Config { pool_bytes: 8 << 16, block_bytes: 1 << 16, ..Config::default() };
        let machine = Machine::new(config.machine(), None);
        let mode = IoMode { engine: EngineKind::Portable, fixed: true, direct: false };
        let (pool, queue) = (machine.pool().unwrap(), machine.queue(&mode).unwrap());
        let held = [pool.lease().unwrap(), pool.lease().unwrap()];
        drop((pool, queue));
        assert_eq!(machine.release(), 0);
        assert!(machine.made_pool().is_some(), "a buffer of it is lent");
        drop(held);
        let queue = machine.queue(&mode).unwrap();
        assert_eq!(machine.release(), 2 * BLOCK, "the engine has none of it");
        let pool = machine.pool().unwrap();
        drop(pool.lease().unwrap());
        drop(queue);
        assert_eq!(machine.release(), 0);
        assert!(machine.queues.lock().unwrap().is_empty());
        drop(pool);
        assert_eq!((machine.release(), machine.has_anything()), (BLOCK, false));
        assert_eq!(machine.release(), 0);
    }

    /// A forked child has one thread: what another one had locked stays locked.
    #[test]
    fn forked_child_does_not_wait_for_the_lock_of_another_thread() {
        const NAME: &str = "pipeline::runtime::tests::\
                            forked_child_does_not_wait_for_the_lock_of_another_thread";
        const CHILD: &str = "RINGSTOW_TEST_FORKED";
        if std::env::var_os(CHILD).is_none() {
            // Other tests run in this process, which must not count as forked.
            let mut child = Command::new(std::env::current_exe().unwrap());
            let ran = child.args(["--exact", NAME]).env(CHILD, "1").output().unwrap();
            let said = String::from_utf8_lossy(&ran.stdout);
            assert!(ran.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let parents = Runtime::shared(&config(1049)).unwrap();
        let held = KEPT.lock().unwrap();
        let own = returned(|| {
            Runtime::forget_after_fork();
            Runtime::shared(&config(1049)).unwrap()
        });
        assert!(!std::ptr::eq(parents.machine(), own.machine()));
        drop(held);
    }
}
