// SPDX-License-Identifier: Apache-2.0

// Package machine gives tests what a developer's machine lacks: hosts joined by a cable (Host,
// BetweenHosts), disks that fail or that log all writes (MapDisk), and real RDMA verbs
// (VerbsDevices). If the machine, or the user, cannot provide it, the error is a
// *driver.UnavailableError, which skips the test.
//
// Tests on real RDMA verbs are plain tests whose names begin with TestReal:
//
//	devices, err := machine.VerbsDevices(2)
//	if err != nil {
//		drivertest.SkipIfUnavailable(t, err)
//	}
//
// A machine with RDMA devices runs them as it does all others. Elsewhere they are skipped, and
// `make guest`, a part of `make test-all`, runs them in a small virtual machine with software
// devices (hack/guest), from test binaries that were built outside: see CONTRIBUTING.
package machine
