// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
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

// TestMessagesOverTCP: the lane for messages decides, not one that UCX has beside it.
func TestMessagesOverTCP(t *testing.T) {
	const tcp, rc = "# lane[%d]: 1:tcp/eth0.0 md[0] -> md[0]/tcp/sysdev[255] %s\n",
		"# lane[%d]: 5:rc_mlx5/mlx5_0:1.0 md[2] -> md[2]/ib/sysdev[0] %s\n"
	require.True(t, overTCP(fmt.Sprintf(tcp, 0, "am am_bw#0")))
	require.True(t, overTCP(fmt.Sprintf(rc, 0, "rma_bw")+fmt.Sprintf(tcp, 1, "am")))
	require.False(t, overTCP(fmt.Sprintf(rc, 0, "am")+fmt.Sprintf(tcp, 1, "wireup")))
}
