// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// ucxLibrary is what LoadUCX opens when it is given no path.
const ucxLibrary = "libucp.so.0"

var ucxLoaded struct {
	sync.Mutex
	path string // empty: not loaded
}

// LoadUCX opens libucp, once in the life of the process; further calls cost a
// lock. path names the library, "" the one of the system. When it cannot be used
// (missing, too old, a function missing, another one open already) nothing is
// changed, a later call may try again, and the error is a
// *driver.UnavailableError.
//
// The first call sets variables of the C environment that the user has not set,
// so it must not run while other C code reads that.
func LoadUCX(path string) error {
	if path == "" {
		path = ucxLibrary
	}
	ucxLoaded.Lock()
	defer ucxLoaded.Unlock()
	switch ucxLoaded.path {
	case path:
		return nil
	case "":
	default:
		return ucxUnavailable(fmt.Sprintf("%s is open already, and a process has one UCX: %s "+
			"is not opened", ucxLoaded.path, path),
			"give the same path everywhere")
	}
	if reason, fix := loadUCX(path); reason != "" {
		return ucxUnavailable(reason, fix)
	}
	ucxLoaded.path = path
	return nil
}

func ucxUnavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "ucx", Reason: reason, Fix: fix}
}
