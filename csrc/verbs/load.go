// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// systemLibrary is the library that Load opens without a path.
const systemLibrary = "libibverbs.so.1"

var library struct {
	sync.Mutex
	path string // empty: not loaded
	open int    // contexts
}

// Load opens libibverbs; further calls cost a lock. path names the library, "" the one of
// the system. It stays open for the life of the process. When it cannot be used (missing, a
// function missing, another one in use by a context) nothing is changed, a later call
// may try again, and the error is a *driver.UnavailableError.
func Load(path string) error {
	if path == "" {
		path = systemLibrary
	}
	library.Lock()
	defer library.Unlock()
	if library.path == path {
		return nil
	}
	if library.open > 0 {
		return unavailable(fmt.Sprintf("%s is in use, and a process has one libibverbs: %s "+
			"is not opened",
			library.path, path), "give the same path everywhere")
	}
	if reason, fix := loadLibrary(path); reason != "" {
		return unavailable(reason, fix)
	}
	library.path = path
	return nil
}

// hold keeps the library for a context, and release ends that.
func hold() error {
	library.Lock()
	defer library.Unlock()
	if library.path == "" {
		return unavailable("libibverbs is not open", "call Load before")
	}
	library.open++
	return nil
}

func release() {
	library.Lock()
	library.open--
	library.Unlock()
}

// Devices counts the devices that the library which Load has opened finds
// now. None at all is a *driver.UnavailableError that says what is missing.
func Devices() (int, error) {
	if err := hold(); err != nil {
		return 0, err
	}
	defer release()
	n, why := countDevices()
	switch {
	case why == "ENOSYS":
		return 0, unavailable("no RDMA device: the kernel has no support for any",
			"modprobe ib_uverbs and the driver of the device; without one: modprobe rdma_rxe, "+
				"rdma link add rxe0 type rxe netdev eth0")
	case why != "":
		return 0, unavailable("cannot list RDMA devices: "+why, "look into /sys/class/infiniband "+
			"and /dev/infiniband")
	case n == 0:
		return 0, unavailable("no RDMA device that libibverbs has a provider for",
			"apt-get install ibverbs-providers, and modprobe the driver of the device; without "+
				"one: modprobe rdma_rxe, rdma link add rxe0 type rxe netdev eth0")
	}
	return n, nil
}

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "rdma", Reason: reason, Fix: fix}
}
