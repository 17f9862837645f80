// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

func TestNetworkTransports(t *testing.T) {
	const all = "^posix,sysv,cma,self,xpmem,knem"
	for list, want := range map[string]string{
		"all": all, " all ": all, "all,tcp": all, "^sm": all, "^sysv,cma,self": all,
		"tcp": "tcp", "rc, tcp": "rc,tcp", "posix,cma,tcp": "tcp", "self,tcp": "tcp",
		"^ib": all + ",ib", "^cma,tcp": all + ",tcp",
	} {
		if got, err := networkTransports(list); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", list, got, err, want)
		}
	}
	for _, list := range []string{"", "^", "self", "cma,self", "tcp,,rc", "tcp,^rc", "tcp rc",
		"A=b"} {
		if got, err := networkTransports(list); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%q: %q, %v, want %v", list, got, err, driver.ErrBounds)
		}
	}
	_, err := networkTransports("posix,sysv")
	require.ErrorContains(t, err, "the shm backend", "the cure")
}

// TestContextConfig: the user's settings are the last, and win.
func TestContextConfig(t *testing.T) {
	c := Config{Settings: []string{"A=b"}, Devices: "lo"}
	c.EnsureDefaults()
	u := c.context("tcp")
	require.Equal(t, "lo", u.Devices)
	require.Equal(t, []string{"RNDV_THRESH=inf", "TCP_TX_SEG_SIZE=65536", "TCP_RX_SEG_SIZE=131072",
		"A=b"}, u.Settings)
}

func TestConfigCheck(t *testing.T) {
	for what, c := range map[string]Config{
		"negative Workers":    {Workers: -1},
		"too many Workers":    {Workers: workersMax + 1},
		"BatchesMax no power": {BatchesMax: 1000},
		"negative NotifyMax":  {NotifyMax: -1},
		"KeysMax":             {KeysMax: session.KeyLimit + 1},
		"ConnsMax":            {ConnsMax: -1},
		"Grace too short":     {Grace: time.Millisecond},
		"Grace too long":      {Grace: time.Hour},
		"Failure below Grace": {Failure: time.Second},
		"negative Spin":       {Spin: -1},
		"Transports":          {Transports: "self"},
	} {
		if b, err := New(c); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%s: %v, %v", what, b, err)
		}
	}
}
