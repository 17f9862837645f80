// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/machine"
)

// needs skips a test for what the machine, or the user, lacks.
func needs(t testing.TB, reason string) {
	t.Helper()
	drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "posix", Reason: reason,
		Fix: "run the test as root"})
}

func TestBlockDevice(t *testing.T) {
	const size = 192 << 20
	device, _ := machine.LoopDevice(t, machine.DiskFile(t, size))
	for _, v := range []struct {
		name string
		cfg  Config
		off  uint64
	}{{"ring", Config{Path: PathRing}, 0}, {"threads-odd", Config{Path: PathThreads}, 777}} {
		t.Run(v.name, func(t *testing.T) {
			h := harness(v.name, v.cfg, drivertest.DeviceMemory(device, size, v.off))
			h.Only = drivertest.Moving
			drivertest.Run(t, h)
		})
	}
	f, err := Open(device, OpenOptions{})
	require.NoError(t, err)
	defer f.Close()
	if n := f.Segment().Len; n != size {
		t.Errorf("a device of %d bytes has %d", size, n)
	}
	if err := f.Grow(2 * size); err == nil {
		t.Error("a device has grown")
	}
}
