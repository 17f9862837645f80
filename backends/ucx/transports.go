// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// What was tried out for one eager message. The segment leaves room for the
// headers of UCX and ours.
const (
	segmentMax      = 60 << 10
	tcpSendBytes    = 64 << 10
	tcpReceiveBytes = 128 << 10
)

// sharing are UCX's names of transports within one host, aliases at the end.
var sharing = []string{"posix", "sysv", "cma", "self", "xpmem", "knem", "sm", "shm", "mm"}

// networkTransports is Config.Transports without those that share memory, as UCX_TLS takes it. A
// leading ^ negates a whole list, as in UCX.
func networkTransports(list string) (string, error) {
	rest, negated := strings.CutPrefix(strings.TrimSpace(list), "^")
	var names []string
	for name := range strings.SplitSeq(rest, ",") {
		name = strings.TrimSpace(name)
		if name == "" || strings.ContainsAny(name, "^ =") {
			return "", fmt.Errorf("config: Transports %q: %q is no name of a transport: %w", list,
				name, driver.ErrBounds)
		}
		if !slices.Contains(sharing, name) {
			names = append(names, name)
		}
	}
	switch {
	case negated:
		return "^" + strings.Join(append(slices.Clone(sharing[:6]), names...), ","), nil
	case slices.Contains(names, "all"):
		return "^" + strings.Join(sharing[:6], ","), nil
	case len(names) == 0:
		return "", fmt.Errorf("config: Transports %q shares memory, which is the shm backend's "+
			"work: use that, or add tcp: %w", list, driver.ErrBounds)
	}
	return strings.Join(names, ","), nil
}

// listed reports whether a transport may be chosen from a list of UCX_TLS.
func listed(list, name string) bool {
	rest, negated := strings.CutPrefix(list, "^")
	return slices.Contains(strings.Split(rest, ","), name) != negated
}

// context is what the context is opened with. Nothing goes by rendezvous: UCX would make the
// copy later than we look at how old a message is, and from memory of the program.
func (c *Config) context(transports string) ucp.Config {
	u := ucp.Config{
		Transports: transports, Devices: c.Devices,
		Workers: c.Workers, BatchesMax: c.BatchesMax, NotifyMax: c.NotifyMax,
		SegmentMax: segmentMax, SpinNanos: uint64(c.Spin), GraceNanos: uint64(c.Grace),
		Settings: []string{"RNDV_THRESH=inf"},
	}
	if listed(transports, "tcp") {
		u.Settings = append(u.Settings, "TCP_TX_SEG_SIZE="+strconv.Itoa(tcpSendBytes),
			"TCP_RX_SEG_SIZE="+strconv.Itoa(tcpReceiveBytes))
	}
	u.Settings = append(u.Settings, c.Settings...)
	return u
}
