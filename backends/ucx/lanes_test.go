// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLanes reads what UCX prints of an endpoint.
func TestLanes(t *testing.T) {
	require.Equal(t, "; lanes tcp/eth0 (am am_bw#0), rc_mlx5/mlx5_0:1",
		lanesOf("# lane[0]: 1:tcp/eth0.0 md[0] -> md[0]/tcp/sysdev[255] am am_bw#0\n"+
			"# lane[1]: 5:rc_mlx5/mlx5_0:1.0 md[2] -> md[2]/ib/sysdev[0]\n"))
	require.Empty(t, lanesOf("# am_send: 0..(inf)\n"))
}

// TestCostOverTCP: the backend tcp does better where UCX has nothing but TCP.
func TestCostOverTCP(t *testing.T) {
	for _, c := range []struct {
		transports, devices string
		rate                float64
	}{
		{"tcp", "mlx5_0:1", 2e9}, {"all", "eth0", 2e9}, {"^ib", "mlx5_0:1", 2e9},
		{"all", "mlx5_0:1", 5e9}, {"rc,tcp", "eth0,mlx5_0:1", 5e9},
	} {
		list, err := networkTransports(c.transports)
		require.NoError(t, err)
		cfg := Config{Devices: c.devices}
		require.Equal(t, c.rate, cfg.caps(list).Cost.Rate, "%+v", c)
	}
}
