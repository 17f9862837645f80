// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// Of two hosts, each has addresses that the other finds.
var (
	hostHarness = drivertest.Harness{
		Name:    "tcp-host",
		New:     func() (driver.Backend, error) { return New(Config{Plaintext: true, Listen: ":0"}) },
		Wirings: drivertest.Processes,
	}
	secureHostHarness = drivertest.Harness{
		Name:    "tcp-tls-host",
		New:     func() (driver.Backend, error) { return New(Config{TLS: sharedAuthority.config(), Listen: ":0"}) },
		Wirings: drivertest.Processes,
		Only: []string{"Load", "NotifyAfterData", "NotifyOrder", "CancelWrite", "PeerClose", "LastMessageInFlight",
			"SilenceUnderWrites", "ArmPingPong", "Hammer"},
	}
)

// TestBetweenHosts is the suite over a cable between two network namespaces.
func TestBetweenHosts(t *testing.T) { overCable(t, hostHarness) }

func TestBetweenHostsSecure(t *testing.T) { overCable(t, secureHostHarness) }

func overCable(t *testing.T, h drivertest.Harness) {
	far := betweenHosts(t)
	if far == nil {
		return
	}
	h.Start = far.Start
	drivertest.Run(t, h)
}
