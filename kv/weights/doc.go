// SPDX-License-Identifier: Apache-2.0

// Package weights loads the tensors of safetensors files into memory of the caller, which may have
// registered it with an engine or pinned it. It makes large sequential reads, several at a time,
// and reads ahead of the caller as far as the memory allows.
//
// What arrives is the files of a model, as any io.ReaderAt, and one piece of memory. What leaves is
// tensors, each as one contiguous slice of that memory. In order:
//
//  1. OpenFile opens a file so that it can be read past the page cache (file.go). ReadIndex reads
//     which files a sharded model has (index.go).
//  2. Open reads and checks the headers of all files (header.go, model.go), before any tensor is
//     read. Model.MemoryFor says how much memory holds them all at once.
//  3. Model.Load starts the readers (load.go). Each claims the next piece: at most Config.Piece
//     bytes that are contiguous in the file and in memory (read.go). ring.go gives each tensor its
//     place; the memory is a ring if it does not hold all of them.
//  4. Next and Wait return a tensor once all its bytes have arrived. It stays valid until Release,
//     which lets the readers go on. If the memory holds all tensors, none needs to be released.
//  5. Close stops the readers and waits for them. From then on the memory does not change.
//
// Write makes such a file (write.go).
//
// # What is checked
//
// Files are not trusted. A header is checked before it is used: for lengths and products that
// overflow, types, overlaps, gaps, and bytes beyond the end of the file. The package accepts the
// same files as the safetensors library, except that it refuses tensors of more than 64 dimensions,
// and entries in forms that no writer makes. A test compares both on files with random changes
// (wheel_test.go). Errors are a *FileError, which names file and tensor. Open also recognizes some
// other file formats and names them in the error.
package weights
