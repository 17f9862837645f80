// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// libraryName is what Load opens when it is given no path.
const libraryName = "libucp.so.0"

var loaded struct {
	sync.Mutex
	path string // empty: not loaded
}

// Load opens libucp, once in the life of the process; further calls cost a
// lock. path names the library, "" the one of the system. When it cannot be used
// (missing, too old, a function missing, another one open already) nothing is
// changed, a later call may try again, and the error is a
// *driver.UnavailableError.
//
// The first call sets variables of the C environment that the user has not set,
// so it must not run while other C code reads that.
func Load(path string) error {
	if path == "" {
		path = libraryName
	}
	loaded.Lock()
	defer loaded.Unlock()
	switch loaded.path {
	case path:
		return nil
	case "":
	default:
		return unavailable(fmt.Sprintf("%s is open already, and a process has one UCX: %s "+
			"is not opened", loaded.path, path),
			"give the same path everywhere")
	}
	if reason, fix := load(path); reason != "" {
		return unavailable(reason, fix)
	}
	loaded.path = path
	return nil
}

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "ucx", Reason: reason, Fix: fix}
}
