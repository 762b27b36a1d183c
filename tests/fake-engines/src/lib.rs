//! Engines that only tests and benches use. They implement [`Engine`](ringstow::internals::engine::Engine) as the
//! shipped ones do; hand them to [`Runtime::with_engine`](ringstow::Runtime::with_engine).

mod faulty;
mod null;
mod twisted;

pub use faulty::{Faults, Faulty};
pub use null::Null;
pub use twisted::{Twist, Twisted};
