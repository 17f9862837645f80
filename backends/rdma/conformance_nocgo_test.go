// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package rdma

import (
	"testing"

	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestFake: with cgo TestStandIn has what lies above C.
func TestFake(t *testing.T) { drivertest.Run(t, fakeHarness) }
