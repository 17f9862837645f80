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
	nearSegmentBytes = 16 << 10
	nearSegmentMax   = nearSegmentBytes - 512
	nearFIFO         = 256 // segments
	farSegmentMax    = 60 << 10
	tcpSendBytes     = 64 << 10
	tcpReceiveBytes  = 128 << 10
)

// nearNames are UCX's names of transports that share memory, nearAlone those of
// them that carry messages between processes: without one of these the others
// are of no use to us.
var (
	nearNames   = []string{"posix", "sysv", "cma", "self", "xpmem", "knem", "sm", "shm", "mm"}
	nearAlone   = []string{"posix", "sysv", "xpmem", "sm", "shm", "mm"}
	nearDefault = strings.Split(NearTransports, ",")
	nearAll     = []string{"posix", "sysv", "cma", "self", "xpmem", "knem"}
	nearAliases = map[string][]string{
		"sm":  {"posix", "sysv", "cma", "xpmem", "knem"},
		"shm": {"posix", "sysv", "cma", "xpmem", "knem"},
		"mm":  {"posix", "sysv", "xpmem"},
	}
)

// NearTransports is Config.Transports for peers of this host alone: no port of the
// network is opened.
const NearTransports = "posix,sysv,cma,self"

// transports are the two lists that Config.Transports falls into, each as UCX_TLS
// takes it. Empty: that side is absent.
type transports struct {
	near, far string
}

// splitTransports parts what shares memory from what does not. A leading ^
// negates a whole list, as in UCX.
func splitTransports(list string) (t transports, err error) {
	rest, negated := strings.CutPrefix(strings.TrimSpace(list), "^")
	var names []string
	for name := range strings.SplitSeq(rest, ",") {
		name = strings.TrimSpace(name)
		if name == "" || strings.ContainsAny(name, "^ =") {
			return t, fmt.Errorf("config: Transports %q: %q is no name of a transport: %w", list,
				name, driver.ErrBounds)
		}
		names = append(names, name)
	}
	switch {
	case negated:
		t = withoutTransports(names)
	case slices.Contains(names, "all"):
		t = withoutTransports(nil)
	default:
		t = onlyTransports(names)
	}
	if t.near == "" && t.far == "" {
		return t, fmt.Errorf("config: Transports %q leaves none that connects processes: add "+
			"posix or tcp: %w", list, driver.ErrBounds)
	}
	return t, nil
}

func isNear(name string) bool { return slices.Contains(nearNames, name) }

func onlyTransports(names []string) transports {
	var near, far []string
	for _, name := range names {
		if isNear(name) {
			near = append(near, name)
		} else {
			far = append(far, name)
		}
	}
	return transports{near: ifConnects(near), far: strings.Join(far, ",")}
}

func withoutTransports(names []string) transports {
	without := slices.Clone(nearAll)
	gone := map[string]bool{}
	for _, name := range names {
		gone[name] = true
		for _, meant := range nearAliases[name] {
			gone[meant] = true
		}
		if !isNear(name) {
			without = append(without, name)
		}
	}
	near := slices.DeleteFunc(slices.Clone(nearDefault), func(name string) bool {
		return gone[name]
	})
	return transports{near: ifConnects(near), far: "^" + strings.Join(without, ",")}
}

// ifConnects is the list, or nothing where no name of it carries messages.
func ifConnects(names []string) string {
	if !slices.ContainsFunc(names, func(name string) bool {
		return slices.Contains(nearAlone, name)
	}) {
		return ""
	}
	return strings.Join(names, ",")
}

// listed reports whether a transport may be chosen from a list of UCX_TLS.
func listed(list, name string) bool {
	rest, negated := strings.CutPrefix(list, "^")
	return slices.Contains(strings.Split(rest, ","), name) != negated
}

// overTCP reports whether UCX has nothing but TCP for peers on other hosts: the list far names
// nothing else, or there is no RDMA device that it may use.
func (c *Config) overTCP(far string) bool {
	names := strings.Split(far, ",")
	if rest, negated := strings.CutPrefix(far, "^"); negated {
		names = without(farKnown, strings.Split(rest, ","))
	}
	devices := networkDevices()
	if c.Devices != "" && c.Devices != "all" {
		devices = strings.Split(c.Devices, ",")
	}
	port := func(device string) bool { return strings.Contains(device, ":") }
	other := func(name string) bool { return !strings.HasPrefix(name, "tcp") }
	return far != "" && !(slices.ContainsFunc(names, other) && slices.ContainsFunc(devices, port))
}

// copies reports whether the kernel may copy between processes: a program that does without
// cma means that it must not, in whichever way.
func (t transports) copies() bool {
	return slices.ContainsFunc(strings.Split(t.near, ","), func(name string) bool {
		return name == "cma" || slices.Contains(nearAliases[name], "cma")
	})
}

// nearConfig is what the context for peers of this host is opened with.
func (c *Config) nearConfig(t transports) ucp.Config {
	u := c.base()
	u.Transports, u.Shared, u.Pull, u.SegmentMax = t.near, true, t.copies(), nearSegmentMax
	u.Settings = append(u.Settings, "MM_SEG_SIZE="+strconv.Itoa(nearSegmentBytes), "MM_FIFO_SIZE="+
		strconv.Itoa(nearFIFO))
	u.Settings = append(u.Settings, c.Settings...)
	return u
}

// farConfig is what the context for all other peers is opened with.
func (c *Config) farConfig(t transports) ucp.Config {
	u := c.base()
	u.Transports, u.Devices, u.SegmentMax = t.far, c.Devices, farSegmentMax
	if listed(t.far, "tcp") {
		u.Settings = append(u.Settings, "TCP_TX_SEG_SIZE="+strconv.Itoa(tcpSendBytes),
			"TCP_RX_SEG_SIZE="+strconv.Itoa(tcpReceiveBytes))
	}
	u.Settings = append(u.Settings, c.Settings...)
	return u
}

// base is what both contexts have in common. Nothing goes by rendezvous: UCX would make the
// copy later than we look at how old a message is, and from memory of the program.
func (c *Config) base() ucp.Config {
	return ucp.Config{
		Workers: c.Workers, BatchesMax: c.BatchesMax, NotifyMax: c.NotifyMax,
		SpinNanos: uint64(c.Spin), GraceNanos: uint64(c.Grace), FailureNanos: uint64(c.Failure),
		Settings: []string{"RNDV_THRESH=inf"},
	}
}
