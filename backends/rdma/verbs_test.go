// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"net/netip"
	"testing"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// standIn is how to open backends over the stand-in for libibverbs: all of the host code, C
// included, and no device.
func standIn(t testing.TB, devices int) (*fakeverbs.Fabric, func(Config) (*Backend, error)) {
	t.Helper()
	f := fakeverbs.Open(t, devices, verbs.Load)
	kernel := standInSysfs(t, devices)
	return f, func(cfg Config) (*Backend, error) {
		cfg.Library = fakeverbs.Path()
		if cfg.sysfs == nil {
			cfg.sysfs = kernel
		}
		if cfg.Listen == "" {
			cfg.Listen = "127.0.0.1:0"
		}
		return New(cfg)
	}
}

// standInSysfs is what the kernel tells of the stand-in's devices.
func standInSysfs(t testing.TB, devices int) *sysfs {
	t.Helper()
	return &sysfs{root: fakeverbs.Sysfs(t, devices), state: stateOf,
		prefixes: func(string) (list []netip.Prefix) {
			for i := range devices {
				list = append(list,
					netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 99, 0, byte(i + 1)}), 24))
			}
			return list
		}}
}

// TestStandIn runs the suite over the stand-in.
func TestStandIn(t *testing.T) {
	f, openStandIn := standIn(t, 2)
	leak.Check(t, f.InUse)
	drivertest.Run(t, drivertest.Harness{
		Name:    "rdma-stand-in",
		New:     func() (driver.Backend, error) { return openStandIn(Config{}) },
		Wirings: drivertest.Self | drivertest.Pair,
		Without: []string{"Faults"}, // NICs hold the pages
	})
}
