// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bufio"
	stdnet "net" // tests have a net of their own
	"os"
	"path/filepath"
	"slices"
	"strings"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// Findings say which transports and devices UCX has for a Config on this machine.
type Findings struct {
	Version string // of libucp, as in "1.13.1"
	Library string // its file; empty: not known
	// Transports of the network, and the devices that they use.
	Transports, Devices []string
	// names in Config.Transports and Config.Devices that this machine has not
	Absent []string
}

// known are the transports that may be there unasked.
var known = []string{"tcp", "rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5"}

// Examine tries what a Config names, or all that is known, each alone: UCX ignores
// in silence a name that it does not know beside one that it does. An error is a
// *driver.UnavailableError, or says what is wrong with the Config.
func Examine(cfg Config) (f Findings, err error) {
	cfg.EnsureDefaults()
	list, err := networkTransports(cfg.Transports)
	if err != nil {
		return f, err
	}
	if err := ucp.Load(cfg.Library); err != nil {
		return f, err
	}
	f.Version, f.Library = ucp.Version(), loadedFile()
	f.try(&cfg, list)
	return f, nil
}

// try finds the transports and the devices.
func (f *Findings) try(cfg *Config, list string) {
	if rest, negated := strings.CutPrefix(list, "^"); negated {
		f.Transports, _ = tryEach(without(known, strings.Split(rest, ",")))
	} else {
		f.Transports, f.Absent = tryEach(strings.Split(list, ","))
	}
	if len(f.Transports) == 0 {
		return
	}
	if cfg.Devices == "" {
		f.Devices = slices.DeleteFunc(networkDevices(), func(d string) bool {
			return !opens(list, d)
		})
		return
	}
	for device := range strings.SplitSeq(cfg.Devices, ",") {
		if opens(list, device) {
			f.Devices = append(f.Devices, device)
		} else {
			f.Absent = append(f.Absent, device)
		}
	}
}

// without takes off what a negated list of UCX_TLS names, aliases included.
func without(names, gone []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		family, _, _ := strings.Cut(name, "_")
		return slices.Contains(gone, name) || slices.Contains(gone, family) || family != "tcp" &&
			slices.Contains(gone, "ib")
	})
}

// tryEach parts names of transports by whether UCX opens each alone.
func tryEach(names []string) (there, absent []string) {
	for _, name := range names {
		if opens(name, "") {
			there = append(there, name)
		} else {
			absent = append(absent, name)
		}
	}
	return there, absent
}

func opens(transports, devices string) bool {
	u, err := openUCX(ucp.Config{Transports: transports, Devices: devices, Workers: 1,
		BatchesMax: 2, NotifyMax: 1,
		GraceNanos: uint64(graceMin), WakeFD: -1, ControlFD: -1})
	if err != nil {
		return false
	}
	return u.Close() == nil
}

// networkDevices lists what UCX may call a device, the way UCX spells it.
func networkDevices() (names []string) {
	interfaces, _ := stdnet.Interfaces() // none is an answer
	for _, i := range interfaces {
		if i.Flags&stdnet.FlagUp != 0 {
			names = append(names, i.Name)
		}
	}
	ports, _ := filepath.Glob("/sys/class/infiniband/*/ports/*") // the only error is a bad pattern
	for _, port := range ports {
		card := filepath.Base(filepath.Dir(filepath.Dir(port)))
		names = append(names, card+":"+filepath.Base(port))
	}
	return names
}

// loadedFile is where libucp was found.
func loadedFile() string {
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return ""
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		if i := strings.IndexByte(lines.Text(), '/'); i >= 0 &&
			strings.HasPrefix(filepath.Base(lines.Text()[i:]), "libucp") {
			return lines.Text()[i:]
		}
	}
	return ""
}

// Elsewhere is the Config as a peer on another host sees it: without the loopback device.
func (c Config) Elsewhere() (Config, error) {
	f, err := Examine(c)
	if err != nil {
		return c, err
	}
	devices := slices.DeleteFunc(f.Devices, func(d string) bool {
		i, err := stdnet.InterfaceByName(d)
		return err == nil && i.Flags&stdnet.FlagLoopback != 0
	})
	if len(f.Transports) == 0 || len(devices) == 0 {
		return c, &driver.UnavailableError{Backend: "ucx", Reason: "no transport and network " +
			"device that leads to another host",
			Fix: "choose transports and devices that `ucx_info -d` lists"}
	}
	c.Transports, c.Devices = strings.Join(f.Transports, ","), strings.Join(devices, ",")
	return c, nil
}
