// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluicehq/sluice/internal/proc"
)

var inVirtualTime atomic.Bool // a test of this process is

// InVirtualTime calls do in a bubble of testing/synctest, and returns once all goroutines that do
// has started have ended. In a bubble time passes only while every goroutine waits, and then at
// once. So limits are met exactly and cost nothing, and it does not matter whether the machine is
// busy or stands still. No test of the process may run in parallel with such a test.
//
// Backends fault and mem and the engine work in a bubble. Time does not pass while a goroutine
// waits for a socket, a process, a descriptor of the kernel, C code or a sync.Mutex, or spins on
// the clock: set the engine's Config.Spin to Spin. A bubble begins in the year 2000, so a time that
// a package variable has kept from outside is wrong by decades. T.Run is not allowed in a bubble:
// call RunInVirtualTime, which begins one for each sub-test.
//
// A transfer over mem ends before any time passes. A test that needs one in progress delays it with
// fault, or with a device that holds copies back.
func InVirtualTime(t *testing.T, do func(t *testing.T)) {
	t.Helper()
	defer proc.Virtual()()
	inVirtualTime.Store(true)
	defer inVirtualTime.Store(false)
	synctest.Test(t, do)
}

// Spin returns the engine.Config.Spin for tests that may run in virtual time, where an engine must
// not spin.
func Spin() time.Duration {
	if inVirtualTime.Load() {
		return -1
	}
	return 0
}

// RunInVirtualTime runs a sub-test in virtual time.
func RunInVirtualTime(t *testing.T, name string, do func(t *testing.T)) bool {
	t.Helper()
	return t.Run(name, func(t *testing.T) { InVirtualTime(t, do) })
}
