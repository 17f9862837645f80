// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"path/filepath"
	"strings"

	"github.com/sluicehq/sluice/bench"
)

func networkChecks(s *Source) []Check {
	return []Check{s.socketBuffers(), s.rdmaDevices(), s.gpus()}
}

// socketBufferWanted is the bandwidth-delay product of 100 Gbit/s and 0.5 ms,
// rounded down.
const socketBufferWanted = 4 << 20 // 4 MiB

func (s *Source) socketBuffers() Check {
	c := Check{Name: "socket-buffers", State: OK, Backends: backendsOf("tcp"),
		Why: "a stream on a fast link needs buffers of rate x round trip"}
	n, ok := s.number("proc/sys/net/core/wmem_max")
	if !ok {
		c.State, c.Found = Note, "unknown"
		return c
	}
	c.Found = "at most " + bench.RoundSize(n)
	if n < socketBufferWanted {
		c.State = Limited
		c.Fix = "sysctl -w net.core.wmem_max=16777216 net.core.rmem_max=16777216"
	}
	return c
}

func baseNames(paths []string) string {
	names := make([]string, len(paths))
	for i, p := range paths {
		names[i] = filepath.Base(p)
	}
	return strings.Join(names, ", ")
}

func (s *Source) rdmaDevices() Check {
	c := Check{Name: "rdma-devices", State: OK, Backends: backendsOf("rdma"),
		Why: "verbs need a NIC, or soft-RoCE for tests"}
	devices := s.glob("sys/class/infiniband/*")
	if c.Found = baseNames(devices); len(devices) > 0 {
		return c
	}
	c.State, c.Found = Missing, "none"
	if s.exists("sys/class/infiniband") {
		c.Fix = "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
	} else {
		c.Why = "this kernel has no InfiniBand support loaded"
		c.Fix = "modprobe ib_core rdma_rxe   # or boot a kernel with CONFIG_INFINIBAND"
	}
	return c
}

func (s *Source) gpus() Check {
	c := Check{Name: "gpus", State: OK, Backends: backendsOf("cuda gds"),
		Why: "device memory needs a GPU and its driver"}
	cards := s.glob("dev/nvidia[0-9]*")
	if c.Found = baseNames(cards); len(cards) > 0 {
		return c
	}
	c.State, c.Found = Missing, "none"
	c.Fix = "install the NVIDIA driver; containers: --gpus all"
	return c
}
