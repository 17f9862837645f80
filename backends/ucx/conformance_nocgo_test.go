// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ucx

import (
	"testing"

	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestFake: with cgo TestDirect has what lies above C.
func TestFake(t *testing.T) { drivertest.Run(t, fakeHarness) }
