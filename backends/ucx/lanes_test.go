// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What UCX prints of an endpoint over TCP, over a NIC that needs TCP to connect, and of one whose
// text we do not know.
func TestMessagesOverTCP(t *testing.T) {
	for text, want := range map[string]bool{
		"# lane[0]:  1:tcp/eth0.0 md[0] -> md[0]/tcp/sysdev[255] am am_bw#0 keepalive\n": true,
		"# lane[0]:  1:tcp/eth0.0 md[0] -> md[0]/tcp/sysdev[255] rma_bw#0\n" +
			"# lane[1]:  2:tcp/eth1.0 md[0] -> md[0]/tcp/sysdev[255] am am_bw#0\n": true,
		"# lane[0]:  5:rc_mlx5/mlx5_0:1.0 md[2] -> md[2]/ib/sysdev[0] rma_bw#0 am am_bw#0\n" +
			"# lane[1]:  1:tcp/eth0.0 md[0] -> md[0]/tcp/sysdev[255] wireup\n": false,
		"# am_send: 0..(inf)\n": false,
		"":                      false,
	} {
		require.Equal(t, want, messagesBy(text, "tcp/"), text)
	}
	require.Equal(t, "; lanes tcp/eth0 (am am_bw#0)",
		lanesOf("# lane[0]: 1:tcp/eth0.0 md[0] -> md[0]/tcp/sysdev[255] am am_bw#0\n"))
}
