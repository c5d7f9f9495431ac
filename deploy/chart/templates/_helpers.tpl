{{- define "jaxinfer.labels" -}}
app.kubernetes.io/name: jaxinfer
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "jaxinfer.scraped" -}}
prometheus.io/scrape: "true"
prometheus.io/port: "8000"
prometheus.io/path: /metrics
{{- end }}

{{- define "jaxinfer.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "jaxinfer.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false # variables such as JAXINFER_PORT
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # Otherwise each mount lets the group write, and jaxinfer refuses such a cache: compiled programs are code.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "jaxinfer.flags" -}}
{{- range $flag, $value := .Values.engine }}
- --{{ $flag }}
- {{ $value | quote }}
{{- end }}
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- /* What a container with an engine has beside its command: chips, memory, environment, volumes. */ -}}
{{- define "jaxinfer.engineContainer" -}}
image: {{ .Values.image }}
env:
  - {name: JAXINFER_CACHE_DIR, value: /cache/jaxinfer}
  - {name: HF_HUB_OFFLINE, value: "1"}
  - {name: HOME, value: /tmp}
  {{- range $name, $value := .Values.env }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
resources:
  requests:
    cpu: {{ .Values.cpu | quote }}
    memory: {{ .Values.memory }}
  limits:
    memory: {{ .Values.memory }}
    {{- with .Values.chips.resource }}
    {{ . }}: {{ $.Values.chips.count | quote }}
    {{- end }}
securityContext:
  {{- include "jaxinfer.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  - {name: cache, mountPath: /cache}
  {{- if .Values.weightsClaim }}
  - {name: weights, mountPath: /models, readOnly: true}
  {{- end }}
{{- end }}

{{- define "jaxinfer.engineVolumes" -}}
- name: tmp
  emptyDir: {}
- name: shm # between the devices of a host
  emptyDir: {medium: Memory, sizeLimit: 1Gi}
- name: cache
  {{- if .Values.cacheClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.cacheClaim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- with .Values.weightsClaim }}
- name: weights
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}
