// SPDX-License-Identifier: Apache-2.0

//go:build cgo && linux

package nvml

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/csrc/nvml"
	"github.com/sluicehq/sluice/driver"
)

// Answers of nvmlInit that a user can act on.
const (
	noPermission    = 4
	driverNotLoaded = 9
	versionMismatch = 18
)

// session is one library, open and initialised.
type session struct {
	library *nvml.Library
	note    func(what string) // of what the driver did not say
}

// loaded is the library of this process: one for good, since it is never unloaded.
var loaded struct {
	sync.Mutex // held during Examine, too: NVML counts its users
	path       string
	library    *nvml.Library
	err        error // it lacks what is needed
}

// needed are functions without which nothing can be asked: one name of each.
var needed = [][]string{
	{"nvmlInit_v2", "nvmlInit"}, {"nvmlShutdown"}, {"nvmlErrorString"},
	{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
}

// Examine asks the driver, through a library; empty means Library. A process may use one. The error
// is a *driver.UnavailableError where there is none, or no driver. It may take seconds where the
// driver has to wake up its cards, and may be called by any goroutine, one after the other.
func Examine(library string) (f Findings, err error) {
	if library == "" {
		library = Library
	}
	loaded.Lock()
	defer loaded.Unlock()
	if err := load(library); err != nil {
		return f, err
	}
	f.GPUs, f.Absent = []GPU{}, []string{}
	s := session{library: loaded.library, note: func(what string) {
		f.Absent = append(f.Absent, what)
	}}
	if ret := s.library.Do(s.newest("nvmlInit", "_v2")); ret != nvml.Success {
		return f, unavailable(library+": "+s.library.Word(ret), initFix(ret))
	}
	defer func() {
		if ret := s.library.Do("nvmlShutdown"); ret != nvml.Success && err == nil {
			err = fmt.Errorf("nvml: shut down: %s", s.library.Word(ret))
		}
	}()
	err = s.examine(&f)
	return f, err
}

// load opens the library and looks for what is needed.
func load(library string) error {
	if loaded.library != nil {
		if loaded.path != library {
			return fmt.Errorf("nvml: this process uses %s: %w", loaded.path, driver.ErrBusy)
		}
		return loaded.err
	}
	l, err := nvml.Open(library)
	if err != nil {
		return unavailable(err.Error(), installFix)
	}
	loaded.path, loaded.library = library, l
	for _, names := range needed {
		if !l.Has(names[0]) && !l.Has(names[len(names)-1]) {
			loaded.err = unavailable(fmt.Sprintf("%s has no %s", library, names[len(names)-1]),
				"install the whole NVIDIA driver of one version")
		}
	}
	return loaded.err
}

// newest is the name of a function with the first of these endings that the library has.
func (s *session) newest(function string, endings ...string) string {
	for _, e := range endings {
		if s.library.Has(function + e) {
			return function + e
		}
	}
	return function
}

func initFix(ret int) string {
	switch ret {
	case driverNotLoaded:
		return "modprobe nvidia; containers: --gpus all"
	case versionMismatch:
		return "reboot, or load the kernel modules again: they are of another version than " +
			"the library"
	case noPermission:
		return "give this user /dev/nvidia*"
	}
	return installFix
}

// answered notes why there is no answer.
func (s *session) answered(function string, ret int) bool {
	switch {
	case ret == nvml.Success:
		return true
	case !s.library.Has(function):
		s.note(function + ": not in this driver")
	default:
		s.note(function + ": " + s.library.Word(ret))
	}
	return false
}

// text is the answer of the driver, or "".
func (s *session) text(function string) string {
	t, ret := s.library.Text(function)
	if !s.answered(function, ret) {
		return ""
	}
	return t
}

func (s *session) examine(f *Findings) error {
	f.Driver = s.text("nvmlSystemGetDriverVersion")
	f.NVML = s.text("nvmlSystemGetNVMLVersion")
	cuda := s.newest("nvmlSystemGetCudaDriverVersion", "_v2")
	if version, ret := s.library.Number(cuda); s.answered(cuda, ret) {
		f.CUDA = fmt.Sprintf("%d.%d", version/1000, version%1000/10)
	}
	n, ret := s.library.Number(s.newest("nvmlDeviceGetCount", "_v2"))
	if ret != nvml.Success {
		return fmt.Errorf("nvml: count the GPUs: %s", s.library.Word(ret))
	}
	for i := range n {
		f.GPUs = append(f.GPUs, s.gpu(i))
	}
	return nil
}
