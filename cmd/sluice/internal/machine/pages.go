// SPDX-License-Identifier: Apache-2.0

package machine

import "fmt"

func (s *Source) hugePages() Check {
	c := Check{Name: "huge-pages", State: OK, Backends: backendsOf("shm rdma gds cuda"),
		Why: "scattered entries miss the TLB on 4 KiB pages; reserved pages are also cheap to pin"}
	c.Found = fmt.Sprintf("%d of 2 MiB reserved, %d free", s.memory.HugeReserved, s.memory.HugeFree)
	if s.memory.HugeFree == 0 {
		c.State = Limited
		c.Fix = fmt.Sprintf("sysctl -w vm.nr_hugepages=%d   # 8 GiB more; transparent pages serve "+
			"meanwhile", s.memory.HugeReserved+4096)
	}
	return c
}

func (s *Source) transparentPages() Check {
	c := Check{Name: "transparent-huge-pages", State: OK, Found: s.memory.TransparentHuge,
		Why:      "private memory of a program gets huge pages when it asks",
		Backends: backendsOf("mem shm")}
	switch c.Found {
	case "always", "madvise":
	case "":
		c.State, c.Found = Limited, "not in this kernel"
	default:
		c.State = Limited
		c.Fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
	}
	return c
}

// sharedTransparentPages concerns memfd memory, which is what shm maps into
// both processes.
func (s *Source) sharedTransparentPages() Check {
	c := Check{Name: "shared-huge-pages", State: OK, Found: s.memory.ShmemHuge,
		Why: "shared memory gets huge pages when it asks", Backends: backendsOf("shm")}
	switch c.Found {
	case "always", "within_size", "advise", "force":
	case "":
		c.State, c.Found = Limited, "not in this kernel"
	default:
		c.State = Limited
		c.Why = "shared memory gets huge pages only by collapsing them after the first touch, " +
			"which takes time"
		c.Fix = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
	}
	return c
}
