//! Engines that only tests and benches use. They implement [`Engine`](ringstow::internals::engine::Engine) as the
//! shipped ones do; hand them to [`Runtime::with_engine`](ringstow::Runtime::with_engine).

mod at_once;
mod faulty;
mod short;
mod twisted;

pub use at_once::AtOnce;
pub use faulty::{Faults, Faulty};
pub use short::{Short, Supply};
pub use twisted::{Twist, Twisted};
