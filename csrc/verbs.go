// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// verbsLibrary is what LoadVerbs opens when it is given no path.
const verbsLibrary = "libibverbs.so.1"

var verbsLoaded struct {
	sync.Mutex
	path string // empty: not loaded
	open int    // contexts
}

// LoadVerbs opens libibverbs; further calls cost a lock. path names the library, "" the one of
// the system. It stays open for the life of the process. When it cannot be used (missing, a
// function missing, another one in use by a context) nothing is changed, a later call
// may try again, and the error is a *driver.UnavailableError.
func LoadVerbs(path string) error {
	if path == "" {
		path = verbsLibrary
	}
	verbsLoaded.Lock()
	defer verbsLoaded.Unlock()
	if verbsLoaded.path == path {
		return nil
	}
	if verbsLoaded.open > 0 {
		return verbsUnavailable(fmt.Sprintf("%s is in use, and a process has one libibverbs: %s is not opened",
			verbsLoaded.path, path), "give the same path everywhere")
	}
	if reason, fix := loadVerbs(path); reason != "" {
		return verbsUnavailable(reason, fix)
	}
	verbsLoaded.path = path
	return nil
}

// verbsHold keeps the library for a context, and verbsRelease ends that.
func verbsHold() error {
	verbsLoaded.Lock()
	defer verbsLoaded.Unlock()
	if verbsLoaded.path == "" {
		return verbsUnavailable("libibverbs is not open", "call LoadVerbs before")
	}
	verbsLoaded.open++
	return nil
}

func verbsRelease() {
	verbsLoaded.Lock()
	verbsLoaded.open--
	verbsLoaded.Unlock()
}

// VerbsDevices counts the devices that the library which LoadVerbs has opened finds
// now. None at all is a *driver.UnavailableError that says what is missing.
func VerbsDevices() (int, error) {
	if err := verbsHold(); err != nil {
		return 0, err
	}
	defer verbsRelease()
	n, why := countVerbs()
	switch {
	case why == "ENOSYS":
		return 0, verbsUnavailable("no RDMA device: the kernel has no support for any",
			"modprobe ib_uverbs and the driver of the device; without one: modprobe rdma_rxe, rdma link add rxe0 type rxe netdev eth0")
	case why != "":
		return 0, verbsUnavailable("cannot list RDMA devices: "+why, "look into /sys/class/infiniband and /dev/infiniband")
	case n == 0:
		return 0, verbsUnavailable("no RDMA device that libibverbs has a provider for",
			"apt-get install ibverbs-providers, and modprobe the driver of the device; without one: modprobe rdma_rxe, rdma link add rxe0 type rxe netdev eth0")
	}
	return n, nil
}

func verbsUnavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "rdma", Reason: reason, Fix: fix}
}
