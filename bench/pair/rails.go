// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
)

// RailPort is a rail of backend rdma as perftest must be told of it.
type RailPort struct {
	bench.VerbsPort
	Subnet netip.Prefix // of RoCE; not valid: InfiniBand
}

// Rails reads the counters of this side's rails; nil: it is another backend.
func (p *Pair) Rails() []rdma.Rail {
	if p.rails == nil {
		return nil
	}
	return p.rails()
}

// railsOf is what tells of a backend's rails; nil: it is another backend.
func railsOf(list []driver.Backend) func() []rdma.Rail {
	for _, b := range list {
		if b, ok := b.(*rdma.Backend); ok {
			return b.Rails
		}
	}
	return nil
}

func railPorts(list []driver.Backend) (ports []RailPort) {
	rails := railsOf(list)
	if rails == nil {
		return nil
	}
	for _, r := range rails() {
		device, port, _ := strings.Cut(r.Name, ":")
		number, _ := strconv.Atoi(port) // by the backend's own hand
		ports = append(ports, RailPort{bench.VerbsPort{Device: device, Port: number,
			GID: r.GID.Index}, r.GID.Subnet})
	}
	return ports
}
