// SPDX-License-Identifier: Apache-2.0

package ucx

import "github.com/sluicehq/sluice/csrc/ring"

var library = &ring.Library{Backend: "ucx", System: "libucp.so.0", Open: load}

// Load opens libucp, once in the life of the process; further calls cost a
// lock. path names the library, "" the one of the system. When it cannot be used
// (missing, too old, a function missing, another one open already) nothing is
// changed, a later call may try again, and the error is a
// *driver.UnavailableError.
//
// The first call sets variables of the C environment that the user has not set,
// so it must not run while other C code reads that.
func Load(path string) error { return library.Load(path) }
