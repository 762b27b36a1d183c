//! Facts for `ringstow doctor`.
