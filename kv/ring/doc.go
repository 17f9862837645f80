// SPDX-License-Identifier: Apache-2.0

// Package ring lets one process share immutable objects, such as the images of a prompt, with many
// readers of its host, without a copy for each. docs/ring.md has the promises.
//
// The Writer has the memory: a table of rows, one an object, and the bytes of the objects, both
// sealed, so that no other process can write there. A Reader joins by a Unix socket, over which it
// receives both, and a page of its own, with a word for each row: how often it holds the object
// (holds), and how often it has got it (reads). Nobody waits for a lock of another process.
//
// The way of an object (writer.go): Reserve takes a row and room, for which others go; the program
// writes the bytes; Commit stores the row's generation, from which moment on readers find it by its
// Handle, row and generation. A generation is used once, also by later writers at the same path, so
// that the handle of an object that has gone finds nothing, and never other bytes.
//
// The way of a Get (reader.go): raise the word of the row; compare the generation; what is equal is
// held, and stays where it is until View.Close. To evict an object the writer takes the generation
// away first and looks at the words behind that (Writer.evict): one of the two sees the other. If a
// reader holds it, the writer puts the generation back.
//
// What keeps an object: holds; Touch; and readers that it was handed out for (Put, Handle) and that
// have not got it, for Config.Patience at most. Among the others the one goes first that has not
// been handed out or touched for longest.
//
// A reader that has ended holds nothing: its pidfd says so (seat.go). One that is stopped keeps
// what it holds for Config.Frozen. Then the writer takes its seat away, in a word that the reader
// looks at behind each use, so View.Close and Get say ErrRevoked. A reader that writes nonsense
// into its own words keeps objects from going, or lets those go that it was to get: that is all.
package ring
