// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/internal/figures"
)

const unlimited = math.MaxUint64

// limit reads a soft limit from /proc/self/limits, whose columns are separated
// by two spaces or more.
func (s *Source) limit(name string) (uint64, bool) {
	for line := range strings.Lines(s.text("proc/self/limits")) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok {
			continue
		}
		soft, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
		if soft == "unlimited" {
			return unlimited, true
		}
		n, err := strconv.ParseUint(soft, 10, 64)
		return n, err == nil
	}
	return 0, false
}

func limitText(n uint64) string {
	if n == unlimited {
		return "unlimited"
	}
	return figures.RoundSize(n)
}

// memlockWanted is the size of a KV pool of a small model.
const memlockWanted = 8 << 30 // 8 GiB

func (s *Source) memlock() Check {
	c := Check{Name: "memlock", State: OK, Backends: backendsOf("rdma gds cuda"),
		Why: "a NIC or GPU pins what it reaches; io_uring pins its fixed buffers"}
	if len(s.glob("sys/class/infiniband/*")) > 0 {
		// over sockets UCX pins nothing
		c.Backends = backendsOf("ucx rdma gds cuda")
	}
	c.Found = limitText(s.memory.Memlock)
	if s.memory.Memlock < memlockWanted {
		c.State = Limited
		c.Fix = "ulimit -l unlimited   # for services: LimitMEMLOCK=infinity; containers: " +
			"--ulimit memlock=-1"
	}
	return c
}

func (s *Source) numa() Check {
	nodes := max(len(s.memory.Nodes), 1)
	c := Check{Name: "numa", State: OK, Found: fmt.Sprintf("%d node(s)", nodes),
		Why:      "memory on the other socket costs up to half of the bandwidth",
		Backends: backendsOf("shm rdma gds cuda")}
	if balancing, _ := s.number("proc/sys/kernel/numa_balancing"); nodes > 1 && balancing > 0 {
		c.State = Limited
		c.Found += ", automatic balancing on"
		c.Why = "balancing unmaps pages in order to move them: page faults within transfers"
		c.Fix = "sysctl -w kernel.numa_balancing=0"
	}
	return c
}

func (s *Source) descriptors() Check {
	c := Check{Name: "open-files", State: OK, Backends: backendsOf("shm tcp posix ucx rdma"),
		Why: "each peer takes a few descriptors, each shared buffer one"}
	n, ok := s.limit("Max open files")
	if !ok {
		c.State, c.Found = Note, "unknown"
		return c
	}
	c.Found = strconv.FormatUint(n, 10)
	if n == unlimited {
		c.Found = "unlimited"
	}
	if n < 4096 {
		c.State, c.Fix = Limited, "ulimit -n 65536"
	}
	return c
}

// mappingsWanted leaves room for 16,000 shared buffers of peers beside what a
// program maps itself.
const mappingsWanted = 65530 // the kernel's default

func (s *Source) mappings() Check {
	c := Check{Name: "mappings", State: OK, Found: strconv.FormatUint(s.memory.MapsMax, 10),
		Backends: backendsOf("shm"),
		Why: "each shared buffer of a peer is mapped, in pieces after fresh pages were " +
			"put under it"}
	if s.memory.MapsMax < mappingsWanted {
		c.State, c.Fix = Limited, "sysctl -w vm.max_map_count=262144"
	}
	return c
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
	c.Found = "at most " + figures.RoundSize(n)
	if n < socketBufferWanted {
		c.State = Limited
		c.Fix = "sysctl -w net.core.wmem_max=16777216 net.core.rmem_max=16777216"
	}
	return c
}
