//! Uploads in parts. Nobody sees an object before its upload is finished; what is begun and never finished must be aborted.

use super::client::{Bucket, io_error};
use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::{MultipartId, PutMode, PutPayload};
use std::io;

/// An upload that was begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    /// The object's name.
    pub name: String,
    /// The store's number of the upload.
    pub id: MultipartId,
}

/// What the store says of a part that it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part(pub String);

impl Bucket {
    /// Uploads an object at once. One of that name is replaced.
    ///
    /// # Errors
    /// What the store says.
    pub fn upload<B: AsRef<[u8]> + Send + 'static>(
        &self,
        name: &str,
        bytes: Vec<B>,
    ) -> io::Result<()> {
        self.put(name, payload(bytes), PutMode::Overwrite)
    }

    /// Begins an upload.
    ///
    /// # Errors
    /// What the store says.
    pub fn begin(&self, name: &str) -> io::Result<Upload> {
        let (store, key, name) = (self.store.clone(), self.key(name), name.to_owned());
        self.run(async move {
            let id = store.parts().create_multipart(&key).await.map_err(io_error)?;
            Ok(Upload { name, id })
        })
    }

    /// Uploads part `number`, from 0. The memory is free once this returns.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if the store knows no such upload; what it says otherwise.
    pub fn put_part<B: AsRef<[u8]> + Send + 'static>(
        &self,
        upload: &Upload,
        number: usize,
        bytes: Vec<B>,
    ) -> io::Result<Part> {
        let (store, key, id) = (self.store.clone(), self.key(&upload.name), upload.id.clone());
        let payload = payload(bytes);
        self.run(async move {
            let part = store.parts().put_part(&key, &id, number, payload).await;
            part.map(|part| Part(part.content_id)).map_err(io_error)
        })
    }

    /// Makes the parts one object.
    ///
    /// # Errors
    /// As for [`Bucket::put_part`].
    pub fn finish(&self, upload: &Upload, parts: Vec<Part>) -> io::Result<()> {
        let (store, key, id) = (self.store.clone(), self.key(&upload.name), upload.id.clone());
        let parts = parts.into_iter().map(|part| PartId { content_id: part.0 }).collect();
        self.run(async move {
            store.parts().complete_multipart(&key, &id, parts).await.map(drop).map_err(io_error)
        })
    }

    /// Frees what the store keeps of an upload. One that it does not know is no error.
    ///
    /// # Errors
    /// What the store says.
    pub fn abort(&self, upload: &Upload) -> io::Result<()> {
        let (store, key, id) = (self.store.clone(), self.key(&upload.name), upload.id.clone());
        self.run(async move {
            match store.parts().abort_multipart(&key, &id).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(io_error(error)),
            }
        })
    }
}

/// Sends the memory as it is, without a copy.
fn payload<B: AsRef<[u8]> + Send + 'static>(bytes: Vec<B>) -> PutPayload {
    bytes.into_iter().map(Bytes::from_owner).collect()
}
