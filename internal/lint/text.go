// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"go/ast"
	"path"
	"slices"
	"strings"
	"unicode/utf8"
)

const spdx = "SPDX-License-Identifier: Apache-2.0"

// license finds files without the SPDX line on top, or below the interpreter line of a script.
func license(f *File) []Finding {
	comment, ok := map[string]string{
		".go": "// ", ".c": "// ", ".h": "// ", ".cu": "// ", ".sh": "# ", ".py": "# ",
	}[path.Ext(f.Path)]
	if !ok {
		return nil
	}
	text := f.Text
	if strings.HasPrefix(text, "#!") {
		_, text, _ = strings.Cut(text, "\n")
	}
	first, _, _ := strings.Cut(text, "\n")
	if first == comment+spdx || isC(f) && first == "/* "+spdx+" */" {
		return nil
	}
	return []Finding{f.line(1, "no licence on the first line: write %q there", comment+spdx)}
}

func isC(f *File) bool { return slices.Contains([]string{".c", ".h", ".cu"}, path.Ext(f.Path)) }

const columnsMax = 100

// tabs has the width of a tab by the kind of file; 0: columns does not check files of this kind.
var tabs = map[string]int{".go": 4, ".c": 8, ".h": 8, ".cu": 8, ".py": 4, ".md": 4}

// columns finds lines that are too long, except those that cannot be broken: tables, links and code
// in documents, text in raw strings, and directives of the compiler.
func columns(f *File) []Finding {
	tab := tabs[path.Ext(f.Path)]
	if tab == 0 || f.isGenerated() {
		return nil
	}
	raw := f.rawLines()
	var found []Finding
	number, code := 0, false
	for line := range strings.Lines(f.Text) {
		number++
		line = strings.TrimSuffix(line, "\n")
		if path.Ext(f.Path) == ".md" {
			if strings.HasPrefix(strings.TrimSpace(line), "```") {
				code = !code
			}
			if code || strings.HasPrefix(line, "|") || strings.Contains(line, "](") {
				continue
			}
		}
		wide := utf8.RuneCountInString(line) + strings.Count(line, "\t")*(tab-1)
		if wide > columnsMax && !raw[number] && !strings.HasPrefix(line, "//go:") {
			found = append(found, f.line(number, "%d columns of at most %d: break the line", wide,
				columnsMax))
		}
	}
	return found
}

// rawLines returns the numbers of the lines that are part of a raw string.
func (f *File) rawLines() map[int]bool {
	raw := map[int]bool{}
	if f.tree == nil {
		return raw
	}
	ast.Inspect(f.tree, func(n ast.Node) bool {
		s, ok := n.(*ast.BasicLit)
		if !ok || s.Value[0] != '`' {
			return true
		}
		for l := f.fset.Position(s.Pos()).Line; l <= f.fset.Position(s.End()).Line; l++ {
			raw[l] = true
		}
		return true
	})
	return raw
}
