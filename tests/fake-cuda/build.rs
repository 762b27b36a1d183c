//! Names the library as the driver is named, so that a later `dlopen("libcuda.so")` finds it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
