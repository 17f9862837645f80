// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluicehq/sluice/internal/proc"
)

var virtual atomic.Bool // time is

// InVirtualTime calls do in virtual time, and returns once all that it started has ended: in a
// bubble of testing/synctest, where time passes only while every goroutine waits, and then at once.
// Limits are met exactly and cost nothing, and a machine that is busy or stands still does not
// matter. A test that calls it, or anything beside it, must not be Parallel.
//
// Backends fault and mem and the engine run there. A goroutine that waits for a socket, a process,
// a descriptor of the kernel, C code or a sync.Mutex does not let time pass, nor does one that
// spins on the clock: an engine needs Spin. Variables of a package that hold a time of before the
// bubble are off by decades: a bubble begins in the year 2000. T.Run is not allowed in a bubble, so
// each sub-test begins its own, by RunInVirtualTime.
//
// A transfer over mem ends before any time passes. So a test that is to meet one in the middle
// delays it, by fault or by a device that holds copies back.
func InVirtualTime(t *testing.T, do func(t *testing.T)) {
	t.Helper()
	defer proc.Virtual()()
	virtual.Store(true)
	defer virtual.Store(false)
	synctest.Test(t, do)
}

// Spin is what engine.Config.Spin has to be in tests that may run in virtual time: there, none.
func Spin() time.Duration {
	if virtual.Load() {
		return -1
	}
	return 0
}

// RunInVirtualTime runs a sub-test in virtual time.
func RunInVirtualTime(t *testing.T, name string, do func(t *testing.T)) bool {
	t.Helper()
	return t.Run(name, func(t *testing.T) { InVirtualTime(t, do) })
}
