// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"fmt"
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
		"TLS":                 {Settings: []string{"TLS=all"}},
		"NET_DEVICES":         {Settings: []string{"NET_DEVICES=lo"}},
		"RNDV_THRESH":         {Settings: []string{"A=b", "RNDV_THRESH=1"}},
		"no name":             {Settings: []string{"=b"}},
		"no value":            {Settings: []string{"A"}},
		"other names of TLS":  {Settings: []string{"T*S=all"}},
	} {
		if b, err := New(c); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%s: %v, %v", what, b, err)
		}
	}
}

// TestLanes reads what UCX prints of an endpoint. The lane for messages decides, not one that UCX
// has beside it.
func TestLanes(t *testing.T) {
	require.Equal(t, "; lanes tcp/eth0 (am am_bw#0), rc_mlx5/mlx5_0:1",
		lanesOf("# lane[0]: 1:tcp/eth0.0 md[0] -> md[0]/tcp/sysdev[255] am am_bw#0\n"+
			"# lane[1]: 5:rc_mlx5/mlx5_0:1.0 md[2] -> md[2]/ib/sysdev[0]\n"))
	require.Empty(t, lanesOf("# am_send: 0..(inf)\n"))
	const tcp, rc = "# lane[%d]: 1:tcp/eth0.0 md[0] -> md[0]/tcp/sysdev[255] %s\n",
		"# lane[%d]: 5:rc_mlx5/mlx5_0:1.0 md[2] -> md[2]/ib/sysdev[0] %s\n"
	require.True(t, overTCP(fmt.Sprintf(tcp, 0, "am am_bw#0")))
	require.True(t, overTCP(fmt.Sprintf(rc, 0, "rma_bw")+fmt.Sprintf(tcp, 1, "am")))
	require.False(t, overTCP(fmt.Sprintf(rc, 0, "am")+fmt.Sprintf(tcp, 1, "wireup")))
}
